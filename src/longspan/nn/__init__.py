"""Layers other than attention."""

from longspan.nn.dropout import Dropout
from longspan.nn.lora import LoRALinear
from longspan.nn.loss import cross_entropy_sum, logits_of
from longspan.nn.mlp import GatedMLP, MakeLinear
from longspan.nn.mode import eval_mode
from longspan.nn.norm import RMSNorm
from longspan.nn.rope import RotaryEmbedding, apply_rope

__all__ = [
    "Dropout",
    "GatedMLP",
    "LoRALinear",
    "MakeLinear",
    "RMSNorm",
    "RotaryEmbedding",
    "apply_rope",
    "cross_entropy_sum",
    "eval_mode",
    "logits_of",
]

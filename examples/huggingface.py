"""A Llama of Hugging Face with dilated attention, trained by Longspan on Python's own source.

    longspan train examples/huggingface.toml --run-dir llama     # also --nproc 2, layout.shard=2
    python examples/huggingface.py llama "def "                  # generate from its weights

The model has random weights; a saved one would come from `from_pretrained`. It needs transformers:
`pip install "longspan[hf]"`.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import longspan
import longspan.hf  # registers attn_implementation="longspan"

CONTEXT = 256
DILATED = {"kind": "dilated", "segment_lengths": [64, CONTEXT], "dilation_rates": [1, 4]}


class Bytes(torch.utils.data.Dataset):
    """The bytes of text files in windows (CONTEXT + 1,)."""

    def __init__(self, files: list[Path]) -> None:
        data = b"".join(file.read_bytes() for file in files)
        self.data = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.data) - 1) // CONTEXT

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index * CONTEXT :][: CONTEXT + 1].long()


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=None,
        eos_token_id=None,
        longspan={"attention": DILATED},
        attn_implementation="longspan",
    )
    return LlamaForCausalLM(config)


def loss(model: nn.Module, tokens: Tensor) -> tuple[Tensor, int]:
    """The cross-entropy of the next bytes of tokens (batch, CONTEXT + 1), and their number."""
    logits, targets = model(tokens[:, :-1], use_cache=False).logits, tokens[:, 1:]
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum"
    ), targets.numel()


def task(run: longspan.Run) -> longspan.Task:
    library = Path(sysconfig.get_path("stdlib"))
    train, validation = Bytes(sorted(library.glob("[a-s]*.py"))), Bytes([library / "typing.py"])
    return longspan.Task(llama(), loss, train, validation=validation, wrap=LlamaDecoderLayer)


if __name__ == "__main__":
    model = llama()
    model.load_state_dict(longspan.load_weights(sys.argv[1]))
    torch.manual_seed(0)
    prompt = torch.tensor([list(sys.argv[2].encode())])
    (text,) = model.generate(prompt, max_new_tokens=200, do_sample=True, top_k=5)
    print(bytes(text.tolist()).decode(errors="replace"))

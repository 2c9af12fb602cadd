"""A dense GPT of the usual shape, written with torch alone, to compare the speed of training with.

Learned positions, LayerNorm without bias, one product for q, k and v, torch's dense attention, a
GELU MLP of four times the width, tied embeddings and a loss of whole logits; compiled as one graph,
in bf16 by autocast, with the fused AdamW: what nanoGPT does.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, linear, scaled_dot_product_attention

from longspan.benchmarks.measure import StepClock, Steps
from longspan.config import Model


class _Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(hidden, bias=False) for _ in range(2))
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x_BNC: Tensor) -> Tensor:
        qkv = self.qkv(self.norms[0](x_BNC)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.transpose(1, 3).unbind(2)
        y = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x_BNC = x_BNC + self.out(y)
        out: Tensor = x_BNC + self.down(gelu(self.up(self.norms[1](x_BNC))))
        return out


class PlainGPT(nn.Module):
    """Depth, width, heads and vocabulary are those of `model`."""

    def __init__(self, model: Model, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(model.vocab, model.hidden)
        self.positions = nn.Embedding(context, model.hidden)
        self.blocks = nn.ModuleList(_Block(model.hidden, model.heads) for _ in range(model.layers))
        self.norm = nn.LayerNorm(model.hidden, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of tokens (batch, tokens) against targets of the same shape."""
        x_BNC = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x_BNC = block(x_BNC)
        logits = linear(self.norm(x_BNC), self.tokens.weight)
        return cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def measure_plain(
    model: Model, context: int, batch: int, device: torch.device, *, steps: int, warm_up: int
) -> Steps:
    """`steps` steps on random tokens, with optimizer and gradient clipping."""
    is_gpu = device.type == "cuda"
    with device:
        gpt = PlainGPT(model, context)
    loss_of = torch.compile(gpt) if is_gpu else gpt
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)
    with StepClock(device, warm_up) as clock:
        for _ in range(warm_up + steps):
            tokens = torch.randint(model.vocab, (batch, context + 1), device=device)
            with torch.autocast(device.type, torch.bfloat16, enabled=is_gpu):
                loss = loss_of(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            clock.tick()
        return clock.steps()

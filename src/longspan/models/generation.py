"""Sampling from a decoder."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from longspan.attention import KVCache
from longspan.data.tokenizer import Tokenizer
from longspan.errors import UserError

COLD = 1e-6
"""Below this temperature the best token is taken: dividing by it would overflow."""


class Predictor(Protocol):
    """A decoder, or one whose layers lie on several ranks."""

    def new_caches(self) -> list[KVCache]: ...

    def next_logits(self, tokens: Tensor, caches: list[KVCache]) -> Tensor: ...


@torch.no_grad()
def complete(
    model: Predictor,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    device: torch.device,
    count: int,
    context: int,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
) -> str:
    """The prompt and up to `count` tokens after it, ending early where the document ends.

    Keys and values are cached. A text that outgrows `context` goes on from its last half.
    """
    tokens = encode_prompt(tokenizer, prompt)
    stream = torch.Generator().manual_seed(seed)
    caches, unseen = model.new_caches(), tokens[-context:]
    with torch.compiler.set_stance("force_eager"):  # the blocks may be compiled for training
        for _ in range(count):
            if caches[0].length + len(unseen) > context:
                caches, unseen = model.new_caches(), tokens[-max(1, context // 2) :]
            logits = model.next_logits(torch.tensor([unseen], device=device), caches)
            token = pick(logits[0].float().cpu()[: tokenizer.vocab], temperature, top_p, stream)
            if token == tokenizer.end:
                break
            tokens.append(token)
            unseen = [token]
    return tokenizer.decode(tokens)


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The prompt's tokens, of which there must be one at least."""
    tokens = tokenizer.encode(prompt)
    if not tokens:
        raise UserError(f"the prompt {prompt!r} has no token in the tokenizer {tokenizer.name}")
    return tokens


def pick(logits: Tensor, temperature: float, top_p: float, stream: torch.Generator) -> int:
    """A token from logits (vocab,): the best where it is cold, else drawn from the nucleus."""
    if temperature < COLD:
        return int(logits.argmax())
    probabilities, order = (logits / temperature).softmax(-1).sort(descending=True)
    before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.where(before < top_p, 0.0)  # the first is always kept
    return int(order[torch.multinomial(probabilities, 1, generator=stream)])

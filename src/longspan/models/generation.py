"""Text generation with a KV cache: greedy, temperature and nucleus (top-p) sampling."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from longspan.attention import KVCache
from longspan.data.tokenizer import Tokenizer
from longspan.errors import UserError

GREEDY_BELOW = 1e-6
"""Below this temperature decoding is greedy: dividing by it would overflow."""


class Predictor(Protocol):
    """A decoder, possibly split over ranks."""

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
    """The prompt and up to `count` generated tokens; stops early at the end-of-sequence token.

    Beyond `context` tokens, the KV cache is rebuilt from the last half of the context.
    """
    tokens = encode_prompt(tokenizer, prompt)
    rng = torch.Generator().manual_seed(seed)
    caches, pending = model.new_caches(), tokens[-context:]
    with torch.compiler.set_stance("force_eager"):  # blocks may be compiled for the training shapes
        for _ in range(count):
            if caches[0].length + len(pending) > context:
                caches, pending = model.new_caches(), tokens[-max(1, context // 2) :]
            logits = model.next_logits(torch.tensor([pending], device=device), caches)
            logits = logits[0].float().cpu()[: tokenizer.vocab]
            token = sample_token(logits, temperature, top_p, rng)
            if token == tokenizer.eos:
                break
            tokens.append(token)
            pending = [token]
    return tokenizer.decode(tokens)


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Tokenize the prompt, which must give at least one token."""
    tokens = tokenizer.encode(prompt)
    if not tokens:
        raise UserError(f"the tokenizer {tokenizer.name} gives no token for the prompt {prompt!r}")
    return tokens


def sample_token(logits: Tensor, temperature: float, top_p: float, rng: torch.Generator) -> int:
    """Sample a token from logits (vocab,), with temperature and top-p; greedy at temperature 0."""
    if temperature < GREEDY_BELOW:
        return int(logits.argmax())
    probabilities, order = (logits / temperature).softmax(-1).sort(descending=True)
    before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.where(before < top_p, 0.0)  # the most probable token always stays
    return int(order[torch.multinomial(probabilities, 1, generator=rng)])

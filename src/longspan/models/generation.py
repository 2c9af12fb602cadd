"""Text generation with a KV cache: greedy, temperature and nucleus (top-p) sampling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Piece:
    """A piece of generated text."""

    text: str
    """Whole characters; empty while a token's last character is incomplete."""
    tokens: int
    """Tokens generated so far."""


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
) -> Iterator[Piece]:
    """Yield the prompt, then the text of up to `count` generated tokens as each is sampled.

    Stops early at the end-of-sequence token. Beyond `context` tokens, the KV cache is rebuilt from
    the last half of the context.
    """
    tokens = encode_prompt(tokenizer, prompt)
    decoder = StreamDecoder(tokenizer)
    yield Piece(decoder.decode(tokens), 0)
    rng = torch.Generator().manual_seed(seed)
    caches, pending, generated = model.new_caches(), tokens[-context:], 0
    while generated < count:
        if caches[0].length + len(pending) > context:
            caches, pending = model.new_caches(), tokens[-max(1, context // 2) :]
        with torch.compiler.set_stance("force_eager"):  # blocks may be compiled for training shapes
            logits = model.next_logits(torch.tensor([pending], device=device), caches)
        logits = logits[0].float().cpu()[: tokenizer.vocab]
        token = sample_token(logits, temperature, top_p, rng)
        if token == tokenizer.eos:
            break
        tokens.append(token)
        pending, generated = [token], generated + 1
        yield Piece(decoder.decode(pending), generated)
    if rest := decoder.flush():
        yield Piece(rest, generated)


class StreamDecoder:
    """Decodes tokens as they come: the joined texts equal the decoded sequence.

    A token may end within a character, and its text may depend on the token before it (a space
    between words). So each text is what the newest tokens add to the tokens of the text before.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = []
        self._pending: list[int] = []

    def decode(self, tokens: list[int]) -> str:
        """The text that `tokens` add; empty while its last character is incomplete."""
        self._pending = self._pending + tokens
        text = self._new_text()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._before, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        """The text that is held back at the end, with replacement characters."""
        return self._new_text()

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._before)
        return self._tokenizer.decode(self._before + self._pending)[len(before) :]


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

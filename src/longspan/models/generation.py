"""Text generation with a KV cache: a batch of prompts, sampled or greedy, until a stop string."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from longspan.attention import KVCaches
from longspan.data.tokenizer import Tokenizer
from longspan.errors import UserError
from longspan.models.decoding import DecodeStep, is_whole

GREEDY_BELOW = 1e-6
"""Below this temperature decoding is greedy: dividing by it would overflow."""


FinishReason = Literal["stop", "length"]
"""Whether a stop string or end-of-sequence token was reached, or the number of tokens."""


class Predictor(Protocol):
    """A decoder, possibly split over ranks."""

    def new_caches(self, capacity: int | None = None) -> KVCaches: ...

    def next_logits(self, tokens: Tensor, caches: KVCaches) -> Tensor: ...


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, and when a text ends."""

    count: int
    """The maximum number of new tokens."""
    temperature: float = 0.8
    """0 is greedy decoding."""
    top_p: float = 0.95
    """Sample from the most likely tokens with this total probability."""
    top_k: int = 0
    """Sample from this many most likely tokens; 0 is all."""
    seed: int = 0
    """Every prompt of a batch has its own random numbers from this seed, as if it were alone."""
    stop: tuple[str, ...] = ()
    """Texts before which the generated text ends."""
    eos: frozenset[int] | None = None
    """Tokens that end a text; None for that of the tokenizer."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens that occurred, and multiplies the negative ones."""


@dataclass(frozen=True)
class Piece:
    """A piece of generated text."""

    text: str
    """Whole characters; empty while a token's last character is incomplete."""
    tokens: int
    """Tokens generated so far."""
    finish_reason: FinishReason | None = None
    """Of the last piece."""


@dataclass(frozen=True)
class Completion:
    """The text generated for a prompt."""

    prompt: str
    text: str
    tokens: int
    """Tokens generated, without the one that ended the text."""
    finish_reason: FinishReason


TOKENS_BEFORE = 64
"""Tokens of the prompt that the text of new tokens may depend on."""

ForwardContext = Callable[[], AbstractContextManager[object]]


def complete(
    model: Predictor,
    tokenizer: Tokenizer,
    prompt: str,
    sampling: Sampling,
    *,
    device: torch.device,
    context: int,
    forward_context: ForwardContext = nullcontext,
) -> Iterator[Piece]:
    """Yield the prompt, then the text of up to `sampling.count` tokens as each is sampled.

    Beyond `context` tokens, the KV cache is rebuilt from the last half of the context.
    `forward_context` is entered around the model's forward passes.
    """
    tokens = encode_prompt(tokenizer, prompt)
    text = TextStream(tokenizer, sampling, tokens)
    yield Piece(tokenizer.decode(tokens), 0)
    rows = TokenBatch(model, [tokens], sampling, tokenizer.vocab, device, context, forward_context)
    while text.finish_reason is None:
        before, (token,) = text.tokens, rows.sample([False])
        piece = text.add(token)
        if text.tokens > before:
            yield Piece(piece, text.tokens)
    rest = text.flush()
    yield Piece(rest, text.tokens, text.finish_reason)


def complete_batch(
    model: Predictor,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    sampling: Sampling,
    *,
    device: torch.device,
    context: int,
    forward_context: ForwardContext = nullcontext,
) -> list[Completion]:
    """What `complete` generates for each prompt; each decoding step runs all of them."""
    encoded = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    texts = [TextStream(tokenizer, sampling, tokens) for tokens in encoded]
    pieces: list[list[str]] = [[] for _ in prompts]
    rows = TokenBatch(model, encoded, sampling, tokenizer.vocab, device, context, forward_context)
    while not all(is_done := [text.finish_reason is not None for text in texts]):
        for row, token in enumerate(rows.sample(is_done)):
            if not is_done[row]:
                pieces[row].append(texts[row].add(token))
    completions = []
    for prompt, text, found in zip(prompts, texts, pieces, strict=True):
        assert text.finish_reason is not None
        joined = "".join(found) + text.flush()  # which may find a stop string
        completions.append(Completion(prompt, joined, text.tokens, text.finish_reason))
    return completions


class TokenBatch:
    """Samples the next token of each row of a batch.

    Each prompt runs through the model in one forward pass of its own, and its keys and values are
    handed to its row of the KV caches. Then a decoding step runs all rows, at positions of their
    own.
    """

    def __init__(
        self,
        model: Predictor,
        prompts: Sequence[list[int]],
        sampling: Sampling,
        vocab: int,
        device: torch.device,
        context: int,
        forward_context: ForwardContext = nullcontext,
    ) -> None:
        self._model, self._sampling, self._vocab = model, sampling, vocab
        self._device, self._context = device, context
        self._forward_context, self._is_whole = forward_context, is_whole(model)
        self._rows = [list(prompt) for prompt in prompts]
        self._held = [0] * len(prompts)
        """Tokens of each row in the KV caches."""
        longest = max(map(len, prompts))
        self._capacity = min(context, longest + sampling.count)
        rng = torch.Generator().manual_seed(sampling.seed)
        self._draws = torch.rand(sampling.count, generator=rng).to(device)
        self._sampled = 0
        self._step: DecodeStep | None = None
        self._seen: Tensor | None = None
        """Whether each row has each token: bool (batch, vocab), if repetition is penalised."""

    def sample(self, is_done: Sequence[bool]) -> list[int]:
        """The next token of each row; those of rows that are done mean nothing."""
        # A step of a small model is a fifth faster in inference mode, which FSDP does not support.
        quiet = torch.inference_mode() if self._is_whole else torch.no_grad()
        # Compiled blocks are compiled for training shapes.
        with quiet, torch.compiler.set_stance("force_eager"):
            logits = self._next_logits(is_done) if self._step else self._prefill_all()
            logits, draw = logits[:, : self._vocab].float(), self._draws[self._sampled]
            if self._sampling.repetition_penalty != 1:
                logits = self._penalised(logits)
            tokens = sample_tokens(logits, draw, self._sampling).tolist()
        self._sampled += 1
        for row, token in enumerate(tokens):
            if token < 0:
                raise UserError("the model's logits are not finite: its weights have diverged")
            self._rows[row].append(token)
        return [int(token) for token in tokens]

    def _penalised(self, logits: Tensor) -> Tensor:
        """Logits (batch, vocab) with the repetition penalty (Keskar et al. 2019)."""
        penalty, newest = self._sampling.repetition_penalty, [row[-1:] for row in self._rows]
        if self._seen is None:
            self._seen, newest = torch.zeros_like(logits, dtype=torch.bool), self._rows
        for row, tokens in enumerate(newest):
            self._seen[row, torch.tensor(tokens, device=self._device)] = True
        penalised = torch.where(logits < 0, logits * penalty, logits / penalty)
        return logits.where(~self._seen, penalised)

    def _prefill_all(self) -> Tensor:
        """The logits after each prompt, whose keys and values go into the KV caches."""
        logits = []
        for row, tokens in enumerate(self._rows):
            found, caches = self._prefill(tokens[-self._capacity :])
            logits.append(found)
            self._held[row] = caches.length
            if self._step is None:
                batch = len(self._rows)
                caches = caches if batch == 1 else caches.repeat(batch)
                self._step = DecodeStep(
                    self._model.next_logits,
                    caches,
                    self._forward_context,
                    captures=self._is_whole and self._device.type == "cuda",
                )
            else:
                self._step.caches.load_row(row, caches)
        return torch.cat(logits)

    def _prefill(self, tokens: list[int]) -> tuple[Tensor, KVCaches]:
        caches = self._model.new_caches(self._capacity)
        # Kernels keep tables between calls, which training could not use from inference mode.
        with torch.inference_mode(mode=False), torch.no_grad(), self._forward_context():
            given = torch.tensor([tokens], device=self._device)
            return self._model.next_logits(given, caches), caches

    def _next_logits(self, is_done: Sequence[bool]) -> Tensor:
        """The logits after the newest token of each row."""
        step, batch = self._step, len(self._rows)
        assert step is not None
        full = [row for row, held in enumerate(self._held) if held == self._capacity]
        for row in full:  # its keys are computed anew below, or not needed any more
            step.caches.positions.next[row] = self._held[row] = 0
        logits = torch.zeros(batch, 0)
        if len(full) < batch:
            step.caches.positions.length = max(self._held)
            newest = [tokens[-1:] for tokens in self._rows]
            logits = step(torch.tensor(newest, device=self._device))
            self._held = [held + 1 for held in self._held]
        for row in full:
            if not is_done[row]:
                found, caches = self._prefill(self._rows[row][-max(1, self._context // 2) :])
                step.caches.load_row(row, caches)
                self._held[row] = caches.length
                logits = logits if logits.numel() else found.repeat(batch, 1)
                logits[row] = found[0]
        return logits


class TextStream:
    """The text of a row's new tokens: whole characters, and nothing from a stop string on.

    What may be the beginning of a stop string is held back until that is known.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: Sampling, prompt: list[int]) -> None:
        self._decoder = StreamDecoder(tokenizer, before=prompt[-TOKENS_BEFORE:])
        self._sampling = sampling
        self._eos = {tokenizer.eos} if sampling.eos is None else sampling.eos
        self._held, self._is_stopped = "", False
        self.tokens = 0
        self.finish_reason: FinishReason | None = None if sampling.count > 0 else "length"

    def add(self, token: int) -> str:
        """The text that a token adds."""
        if token in self._eos:
            self.finish_reason = "stop"
            return ""
        self.tokens += 1
        if self.tokens == self._sampling.count:
            self.finish_reason = "length"
        return self._before_stop(self._decoder.decode([token]))

    def flush(self) -> str:
        """The text that is held back at the end."""
        text = self._before_stop(self._decoder.flush())
        return text if self._is_stopped else text + self._held

    def _before_stop(self, text: str) -> str:
        """What is certain of the text so far, when `text` follows what was held back."""
        if self._is_stopped:
            return ""
        text = self._held + text
        stops = self._sampling.stop
        found = [index for stop in stops if (index := text.find(stop)) >= 0]
        if found:
            self._is_stopped, self.finish_reason = True, "stop"
            return text[: min(found)]
        longest = max((len(stop) - 1 for stop in stops), default=0)
        tails = (n for n in range(min(longest, len(text)), 0, -1) if _begins(stops, text[-n:]))
        certain = len(text) - next(tails, 0)
        self._held = text[certain:]
        return text[:certain]


def _begins(stops: Sequence[str], text: str) -> bool:
    return any(stop.startswith(text) for stop in stops)


class StreamDecoder:
    """Decodes tokens as they come: the joined texts equal the decoded sequence.

    A token may end within a character, and its text may depend on the token before it (a space
    between words). So each text is what the newest tokens add to the tokens of the text before.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        """`before`: tokens that the first ones follow."""
        self._tokenizer = tokenizer
        self._before = list(before)
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
    """Tokenize the prompt, which must give at least one token, as a document begins."""
    tokens, bos = tokenizer.encode(prompt), list(tokenizer.bos)
    if not tokens:
        raise UserError(f"the tokenizer {tokenizer.name} gives no token for the prompt {prompt!r}")
    return tokens if tokens[: len(bos)] == bos else [*bos, *tokens]


def sample_tokens(logits: Tensor, draw: Tensor, sampling: Sampling) -> Tensor:
    """A token of each row of float32 logits (batch, vocab): int64 (batch,), on their device.

    `draw`: a random number in [0, 1), or one per row (batch, 1). −1: the logits are not finite.
    """
    if sampling.temperature < GREEDY_BELOW:
        best, tokens = logits.max(-1)
        return tokens.where(best.isfinite(), -1)
    probabilities, order = (logits / sampling.temperature).softmax(-1).sort(descending=True)
    if sampling.top_k:
        probabilities[:, sampling.top_k :] = 0
        probabilities /= probabilities.sum(-1, keepdim=True)
    before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.where(before < sampling.top_p, 0.0)  # the first one always stays
    sums = probabilities.cumsum(-1)
    last = (probabilities > 0).sum(-1, keepdim=True) - 1  # rounding may give the draw to the next
    rank = torch.searchsorted(sums, draw * sums[:, -1:], right=True)
    tokens = order.gather(1, rank.minimum(last).clamp(min=0))[:, 0]
    return tokens.where(sums[:, -1].isfinite(), -1)

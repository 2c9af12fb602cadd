"""Sampling from a decoder."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from longspan.data import open_source
from longspan.data.tokenizer import Tokenizer
from longspan.errors import UserError
from longspan.models import Decoder
from longspan.training.device import autocast
from longspan.training.state import load_trained


@torch.no_grad()
def complete(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    count: int,
    context: int,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
) -> str:
    """The prompt and up to `count` tokens after it, ending early where the document ends.

    Keys and values are cached. A text that outgrows `context` goes on from its last half.
    """
    device = model.embedding.weight.device
    tokens = tokenizer.encode(prompt)
    if not tokens:
        raise ValueError("expected a prompt of at least one token, got none")
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


def pick(logits: Tensor, temperature: float, top_p: float, stream: torch.Generator) -> int:
    """A token from logits (vocab,): the best at temperature 0, else drawn from the nucleus."""
    if temperature == 0:
        return int(logits.argmax())
    probabilities, order = (logits / temperature).softmax(-1).sort(descending=True)
    before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.where(before < top_p, 0.0)  # the first is always kept
    return int(order[torch.multinomial(probabilities, 1, generator=stream)])


def complete_from_run(
    run_dir: Path, prompt: str, *, count: int, temperature: float, top_p: float, seed: int
) -> str:
    """`complete` with the newest checkpoint of a run's folder."""
    if not prompt:
        raise UserError("--prompt must not be empty")
    if count < 0 or temperature < 0 or not 0 < top_p <= 1:
        raise UserError(
            "expected --tokens and --temperature of at least 0 and --top-p in (0, 1], got "
            f"{count}, {temperature} and {top_p}"
        )
    run, model, _ = load_trained(run_dir)
    tokenizer = open_source(run.data, run.model).tokenizer
    if tokenizer is None:
        raise UserError(f"{run_dir} was trained on {run.data.source!r}, which is not text")
    with autocast(run):
        return complete(
            model, tokenizer, prompt, count=count, context=run.data.context,
            temperature=temperature, top_p=top_p, seed=seed,
        )  # fmt: skip

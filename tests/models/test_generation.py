"""Generation: greedy decoding equals the argmax, top-p sampling keeps the nucleus."""

from __future__ import annotations

import torch

from longspan.data.tokenizer import ByteTokenizer
from longspan.models import build_decoder
from longspan.models.generation import complete, sample_token
from longspan.runfile import load_run


def test_greedy_decoding_equals_the_argmax_of_full_forward_passes() -> None:
    run = load_run(None, ["model.hidden=32", "data.context=16"])
    device = torch.device("cpu")
    model = build_decoder(run, device)
    text = complete(
        model, ByteTokenizer(), "ab", device=device, count=30, context=16, temperature=0.0
    )
    tokens, start = list(b"ab"), 0
    with torch.no_grad():
        for _ in range(30):
            if len(tokens) - start > 16:
                start = len(tokens) - 8  # a full context restarts from its last half
            hidden = model.hidden(torch.tensor([tokens[start:]]))
            token = int((hidden[0, -1] @ model.head_weight.T).argmax())
            if token == 0:
                break
            tokens.append(token)
    assert text == bytes(tokens).decode(errors="replace")


def test_the_nucleus_is_the_smallest_set_that_reaches_top_p() -> None:
    rng = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    samples = [sample_token(logits, 1.0, 0.75, rng) for _ in range(400)]
    assert set(samples) == {0, 1}
    assert abs(samples.count(0) / 400 - 0.5 / 0.8) < 0.1
    assert {sample_token(logits, 1.0, 1e-9, rng) for _ in range(20)} == {0}
    assert {sample_token(logits, 1.0, 1.0, rng) for _ in range(400)} == {0, 1, 2, 3}

"""Generation: greedy decoding equals the argmax, top-p keeps the nucleus, text streams whole."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longspan.attention import KVCaches
from longspan.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer
from longspan.device import autocast, resolve
from longspan.models import build_decoder
from longspan.models.decoding import is_whole
from longspan.models.generation import (
    Piece,
    Sampling,
    StreamDecoder,
    complete,
    complete_batch,
    sample_tokens,
)
from longspan.parallel.apply import apply_to_blocks
from longspan.runfile import load_run
from tests.harness import Ranks
from tests.steps import CPU, open_state


def test_greedy_decoding_equals_the_argmax_of_full_forward_passes() -> None:
    run = load_run(None, ["model.hidden=32", "data.context=16"])
    model = build_decoder(run, CPU)
    greedy = Sampling(30, temperature=0)
    pieces = complete(model, ByteTokenizer(), "ab", greedy, device=CPU, context=16)
    text = "".join(piece.text for piece in pieces)
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


def sampled(probabilities: list[float], **options: float) -> Tensor:
    """How often each token is sampled, at temperature 1, for equally spaced draws."""
    logits = torch.tensor([probabilities]).log()
    sampling = Sampling(1, **{"temperature": 1.0, "top_p": 1.0} | options)  # type: ignore[arg-type]
    draws = (torch.arange(1000)[:, None] + 0.5) / 1000
    tokens = sample_tokens(logits.expand(1000, -1), draws, sampling)
    return torch.bincount(tokens, minlength=len(probabilities)) / 1000


@pytest.mark.parametrize("options", [[], ["attention.kind=dense"]])
def test_prompts_of_a_batch_continue_as_each_alone(options: list[str]) -> None:
    run = load_run(None, ["model.hidden=32", "data.context=32", *options])
    model, prompts = build_decoder(run, CPU), ["ab", "import os, sys", "x" * 30, "d"]
    sampling = Sampling(40, temperature=2, seed=3)  # beyond the context
    where: dict[str, Any] = {"device": CPU, "context": 32}
    found = complete_batch(model, ByteTokenizer(), prompts, sampling, **where)
    sampling = replace(sampling, stop=(found[1].text[8:10],))  # one ends before the others
    found = complete_batch(model, ByteTokenizer(), prompts, sampling, **where)
    assert [completion.prompt for completion in found] == prompts
    for completion in found:
        alone = list(complete(model, ByteTokenizer(), completion.prompt, sampling, **where))
        assert completion.text == "".join(piece.text for piece in alone[1:])
        assert completion.tokens == alone[-1].tokens
    assert len({completion.tokens for completion in found}) > 1
    assert {completion.finish_reason for completion in found} == {"stop", "length"}


def test_tokens_are_sampled_by_their_probabilities() -> None:
    shuffled = [0.15, 0.5, 0.05, 0.3]
    torch.testing.assert_close(sampled(shuffled), torch.tensor(shuffled), rtol=0, atol=2e-3)
    squared = torch.tensor(shuffled).square()  # a temperature of 1/2
    found = sampled(shuffled, temperature=0.5)
    torch.testing.assert_close(found, squared / squared.sum(), rtol=0, atol=2e-3)


def test_the_nucleus_is_the_smallest_set_that_reaches_top_p() -> None:
    probabilities = [0.5, 0.3, 0.15, 0.05]
    kept = torch.tensor([0.5, 0.3, 0, 0]) / 0.8
    torch.testing.assert_close(sampled(probabilities, top_p=0.75), kept, rtol=0, atol=2e-3)
    assert sampled(probabilities, top_p=1e-9).tolist() == [1, 0, 0, 0]
    torch.testing.assert_close(sampled(probabilities, top_k=2), kept, rtol=0, atol=2e-3)
    # Of the two most likely tokens the first has 0.5 / 0.8 of the probability.
    assert sampled(probabilities, top_k=2, top_p=0.6).tolist() == [1, 0, 0, 0]
    ten = torch.tensor([0.5, 0.3, 0.15, 0.05])
    torch.testing.assert_close(sampled(probabilities, top_k=10), ten, rtol=0, atol=2e-3)


LAYOUT = ["model.hidden=32", "model.heads=4", "model.kv_heads=2", "data.context=64"]
LAYOUT += ["attention.segment_lengths=[4,16]", "attention.dilation_rates=[1,4]"]
LAYOUT += ['attention.layers=[{kind="window",window=6,sinks=2},{}]', "model.learnable_sinks=true"]


def generate_in_a_layout(rank: int, world: int, options: list[str]) -> list[Piece]:
    run = load_run(None, [*LAYOUT, *options, "train.global_batch=2"], world=world)
    with open_state(run, rank, world) as (state, _):
        model = state.engine.inference_model
        greedy = Sampling(24, temperature=0)
        return list(complete(model, ByteTokenizer(), "some", greedy, device=CPU, context=64))


@pytest.mark.parametrize("layout", ["tensor=2", "pipeline=2", "zero=3"])
def test_generation_in_a_layout_equals_one_process(ranks: Ranks, layout: str) -> None:
    expected = generate_in_a_layout(0, 1, [])
    assert expected[-1].tokens > 10
    for found in ranks.run(generate_in_a_layout, 2, [f"layout.{layout}"]):
        assert found == expected


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dense", "dilated", "mixed"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_cuda_graph_computes_what_eager_steps_do(
    kind: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"mixed": LAYOUT, "dilated": LAYOUT[:-1], "dense": ["attention.kind=dense"]}[kind]
    options = [*options, "data.context=64", f"train.precision={precision}"]
    run = resolve(load_run(None, options), torch.device("cuda"))
    model, texts = build_decoder(run, torch.device("cuda")), []
    for is_captured in (True, False):
        if not is_captured:
            monkeypatch.setattr("longspan.models.generation.is_whole", lambda model: False)
        # Beyond the context: a row's keys are computed anew in the buffers that the graph reads.
        sampling = Sampling(70, temperature=0)
        found = complete_batch(
            model, ByteTokenizer(), ["some", "a longer prompt"], sampling,
            device=torch.device("cuda"), context=64, forward_context=partial(autocast, run.train),
        )  # fmt: skip
        texts.append(found)
    assert texts[0] == texts[1]


def test_a_prompt_leaves_no_tensor_of_inference_mode_behind() -> None:
    """Layouts, tables and constants that modules keep may be used in training later."""
    model, modes = build_decoder(load_run(None, ["model.hidden=32", "data.context=16"]), CPU), []
    model.norm.register_forward_hook(lambda *_: modes.append(torch.is_inference_mode_enabled()))
    sampling = Sampling(20, temperature=0)
    list(complete(model, ByteTokenizer(), "ab", sampling, device=CPU, context=16))
    prompts = [i for i, is_inference in enumerate(modes) if not is_inference]
    assert prompts[0] == 0
    assert len(prompts) > 1  # also where the text goes on with the last half of the context
    assert len(modes) > len(prompts)


def test_only_plain_blocks_are_captured() -> None:
    run = load_run(None, ["model.hidden=32", "train.activation_checkpointing=full"])
    model = build_decoder(run, CPU)
    assert is_whole(model)
    apply_to_blocks(model, run.train)
    assert not is_whole(model)
    assert not is_whole(Script(""))


class Script:
    """A model that predicts the bytes of a text, one after another."""

    def __init__(self, text: str) -> None:
        self.rest = list(text.encode())

    def new_caches(self, capacity: int | None = None) -> KVCaches:
        return KVCaches([], capacity or 64)

    def next_logits(self, tokens: Tensor, caches: KVCaches) -> Tensor:
        caches.advance(tokens)
        return torch.nn.functional.one_hot(torch.tensor([self.rest.pop(0)]), 256).float()


def test_text_streams_in_whole_characters_and_stops_at_the_end_of_the_sequence() -> None:
    script = Script("é😀b\0c")
    greedy = Sampling(9, temperature=0)
    pieces = complete(script, ByteTokenizer(), "à", greedy, device=CPU, context=64)
    assert next(pieces) == Piece("à", 0)  # before the model runs
    assert len(script.rest) == 9
    texts = ["", "é", "", "", "", "😀", "b"]
    expected = [Piece(text, n) for n, text in enumerate(texts, start=1)]
    assert list(pieces) == [*expected, Piece("", 7, "stop")]
    two = replace(greedy, count=2)
    cut = complete(Script("a😀"), ByteTokenizer(), "a", two, device=CPU, context=64)
    assert list(cut) == [Piece("a", 0), Piece("a", 1), Piece("", 2), Piece("\ufffd", 2, "length")]


@pytest.mark.parametrize(
    ("script", "stops", "text"),
    [
        ("one STOP two", ["STOP"], "one "),
        ("a STO a STOP", ["STOP"], "a STO a "),  # what only begins a stop string is text
        ("éa😀b", ["😀"], "éa"),  # four bytes, of which each is a token
        ("ab", ["b", "abc"], "a"),  # the one that is found first
        ("xyST", ["STOP"], "xyST"),
        ("aaab", ["aab"], "a"),
        ("a\ufffdb", ["b"], "a\ufffd"),
    ],
)
def test_a_text_ends_before_a_stop_string(script: str, stops: list[str], text: str) -> None:
    sampling = Sampling(len(script.encode()), temperature=0, stop=tuple(stops))
    found = list(complete(Script(script), ByteTokenizer(), "p", sampling, device=CPU, context=64))
    assert "".join(piece.text for piece in found) == "p" + text
    shown = ""
    for piece in found[1:]:  # nothing is shown that is taken back
        shown += piece.text
        assert text.startswith(shown)
    is_stopped = any(stop in script for stop in stops)
    assert found[-1].finish_reason == ("stop" if is_stopped else "length")


def stream(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [decoder.decode([token]) for token in tokens] + [decoder.flush()]


@settings(max_examples=200, deadline=None)
@given(tokens=st.lists(st.one_of(st.integers(0, 255), st.sampled_from(list("é😀".encode())))))
def test_streamed_bytes_equal_the_decoded_sequence(tokens: list[int]) -> None:
    assert "".join(stream(ByteTokenizer(), tokens)) == ByteTokenizer().decode(tokens)


@pytest.mark.parametrize("kind", ["ByteLevel", "Metaspace", "WordPiece"])
def test_streamed_tokens_of_a_json_file_equal_the_decoded_sequence(
    kind: str, tmp_path: Path
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    byte_level = kind == "ByteLevel"
    model = tokenizers.models.WordPiece if kind == "WordPiece" else tokenizers.models.BPE
    inner = tokenizers.Tokenizer(model(unk_token=None if byte_level else "[UNK]"))
    pre = tokenizers.pre_tokenizers
    inner.pre_tokenizer = pre.Whitespace() if kind == "WordPiece" else getattr(pre, kind)()
    inner.decoder = getattr(tokenizers.decoders, kind)()
    trainers = tokenizers.trainers
    trainer = trainers.WordPieceTrainer if kind == "WordPiece" else trainers.BpeTrainer
    alphabet = pre.ByteLevel.alphabet() if byte_level else []
    text = "the cat, the 😀 hat. un été là! " * 3
    options = {"vocab_size": 300, "special_tokens": ["[UNK]", "</s>"], "show_progress": False}
    inner.train_from_iterator([text], trainer(initial_alphabet=alphabet, **options))
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = JsonTokenizer(tmp_path / "tokenizer.json")
    tokens = tokenizer.encode(text)
    texts = stream(tokenizer, tokens)
    assert "".join(texts) == tokenizer.decode(tokens)
    assert not any("\ufffd" in piece for piece in texts)
    assert sum(map(bool, texts)) > 20  # it does not wait for the end
    random = torch.randint(tokenizer.vocab, (300,), generator=torch.Generator().manual_seed(0))
    assert "".join(stream(tokenizer, random.tolist())) == tokenizer.decode(random.tolist())

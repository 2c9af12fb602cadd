"""Generation: greedy decoding equals the argmax, top-p keeps the nucleus, text streams whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longspan.attention import Dense, KVCache
from longspan.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer
from longspan.models import build_decoder
from longspan.models.generation import Piece, StreamDecoder, complete, sample_token
from longspan.runfile import load_run
from tests.harness import Ranks
from tests.steps import CPU, open_state


def test_greedy_decoding_equals_the_argmax_of_full_forward_passes() -> None:
    run = load_run(None, ["model.hidden=32", "data.context=16"])
    model = build_decoder(run, CPU)
    pieces = complete(
        model, ByteTokenizer(), "ab", device=CPU, count=30, context=16, temperature=0.0
    )
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


def test_the_nucleus_is_the_smallest_set_that_reaches_top_p() -> None:
    rng = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    samples = [sample_token(logits, 1.0, 0.75, rng) for _ in range(400)]
    assert set(samples) == {0, 1}
    assert abs(samples.count(0) / 400 - 0.5 / 0.8) < 0.1
    assert {sample_token(logits, 1.0, 1e-9, rng) for _ in range(20)} == {0}
    assert {sample_token(logits, 1.0, 1.0, rng) for _ in range(400)} == {0, 1, 2, 3}


LAYOUT = ["model.hidden=32", "model.heads=4", "model.kv_heads=2", "data.context=64"]
LAYOUT += ["attention.segment_lengths=[4,16]", "attention.dilation_rates=[1,4]"]
LAYOUT += ['attention.layers=[{kind="window",window=6,sinks=2},{}]', "model.learnable_sinks=true"]


def generate_in_a_layout(rank: int, world: int, options: list[str]) -> list[Piece]:
    run = load_run(None, [*LAYOUT, *options, "train.global_batch=2"], world=world)
    with open_state(run, rank, world) as (state, _):
        model = state.engine.inference_model
        pieces = complete(
            model, ByteTokenizer(), "some", device=CPU, count=24, context=64, temperature=0
        )
        return list(pieces)


@pytest.mark.parametrize("layout", ["tensor=2", "pipeline=2", "zero=3"])
def test_generation_in_a_layout_equals_one_process(ranks: Ranks, layout: str) -> None:
    expected = generate_in_a_layout(0, 1, [])
    assert expected[-1].tokens > 10
    for found in ranks.run(generate_in_a_layout, 2, [f"layout.{layout}"]):
        assert found == expected


class Script:
    """A model that predicts the bytes of a text, one after another."""

    def __init__(self, text: str) -> None:
        self.rest = list(text.encode())

    def new_caches(self) -> list[KVCache]:
        return [KVCache(Dense())]

    def next_logits(self, tokens: Tensor, caches: list[KVCache]) -> Tensor:
        return torch.nn.functional.one_hot(torch.tensor([self.rest.pop(0)]), 256).float()


def test_text_streams_in_whole_characters_and_stops_at_the_end_of_the_sequence() -> None:
    script = Script("é😀b\0c")
    pieces = complete(script, ByteTokenizer(), "à", device=CPU, count=9, context=64, temperature=0)
    assert next(pieces) == Piece("à", 0)  # before the model runs
    assert len(script.rest) == 9
    texts = ["", "é", "", "", "", "😀", "b"]
    assert list(pieces) == [Piece(text, n) for n, text in enumerate(texts, start=1)]
    cut = complete(
        Script("a😀"), ByteTokenizer(), "a", device=CPU, count=2, context=64,
        temperature=0,
    )  # fmt: skip
    assert list(cut) == [Piece("a", 0), Piece("a", 1), Piece("", 2), Piece("\ufffd", 2)]


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

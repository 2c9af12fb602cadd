"""The vocabulary of a model follows the tokenizer of its data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from longspan.cli import main
from longspan.data.build import build
from longspan.errors import UserError
from longspan.runfile import load_run
from longspan.training import train

SMALL = ["model.hidden=32", "model.layers=1", "data.context=16", "train.steps=1", "track.prompt="]
ROUNDED = "128: the tokenizer's 70, rounded up to a multiple of 64"


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose tokenizer has 70 words."""
    tokenizers = pytest.importorskip("tokenizers")
    root = tmp_path_factory.mktemp("shards")
    words = {f"w{n}": n for n in range(69)} | {"<eos>": 69}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<eos>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(root / "tokenizer.json"))
    (root / "in.txt").write_text(" ".join(f"w{n % 69}" for n in range(300)))
    build([root / "in.txt"], root / "out", tokenizer=root / "tokenizer.json", validation=0)
    return root / "out"


def test_show_plan_and_train_agree_on_the_vocabulary_of_the_data(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*SMALL, f"data.source={shards}"]
    assert main(["config", "show", "--json", *options]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["run"]["model"]["vocab"], shown["derived"]["vocabulary"]) == (128, ROUNDED)
    assert main(["plan", "--json", *options]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["derived"]["vocabulary"] == ROUNDED
    assert f"{planned['parameters']:,}" == shown["derived"]["parameters"]
    assert main(["train", *options, "--run-dir", str(tmp_path / "run")]) == 0
    assert ROUNDED in capsys.readouterr().err
    saved = load_run(tmp_path / "run" / "run.toml", ["data.source=moved"])
    assert saved.model.vocab == 128


@pytest.mark.parametrize("builtin", ["cpu", "cuda"])
def test_other_presets_and_the_built_in_runs_follow_it_too(shards: Path, builtin: str) -> None:
    source = f"data.source={shards}"
    assert load_run(None, [source, "model.preset=350m"], builtin=builtin).model.vocab == 128
    assert load_run(None, [source, "model.vocab=100"], builtin=builtin).model.vocab == 100
    assert load_run(None, builtin=builtin).model.vocab == 256


def test_a_vocabulary_that_is_set_must_be_large_enough(shards: Path, tmp_path: Path) -> None:
    run = load_run(None, [*SMALL, f"data.source={shards}", "model.vocab=64"])
    with pytest.raises(UserError, match=r"model\.vocab must be at least 70"):
        train(run, tmp_path / "run")


@pytest.mark.parametrize("content", [None, b"{", b"[]", b'{"vocab": "many"}'])
def test_a_folder_that_cannot_be_read_is_reported_when_it_is_opened(
    tmp_path: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "index.json").write_bytes(content)
    options = [*SMALL, f"data.source={tmp_path}"]
    assert main(["config", "show", *options]) == 0
    text = f"# vocabulary: 256; {tmp_path} does not say what its tokenizer has"
    assert text in capsys.readouterr().out
    with pytest.raises(UserError, match="`longspan data build`"):
        train(load_run(None, options), tmp_path / "run")

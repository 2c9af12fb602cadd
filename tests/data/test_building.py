"""Builds that are killed and continued, and builds by several processes: the same bytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from longspan.data.build import build
from longspan.data.documents import Fields
from longspan.errors import UserError

PAIR = Fields(prompt="q", answer="a")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def corpus(tmp_path: Path) -> list[Path]:
    """Two files of JSON Lines with prompts and answers."""
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for number, path in enumerate(paths):
        records = [{"q": f"q{n} " * (n % 5), "a": f"answer {number}" * n} for n in range(1, 60)]
        path.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    return paths


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longspan.data.encoding.BATCH_PIECES", 9)


class Killed(BaseException):
    pass


def build_until(documents: int, inputs: list[Path], out: Path, **options: Any) -> list[str]:
    """Build up to a document, then end as by a kill; returns what was said."""
    notes: list[str] = []

    def stop(count: int, tokens: int, fraction: float) -> None:
        if count == documents:
            raise Killed

    with pytest.raises(Killed):
        build(
            inputs, out, on_document=stop, on_note=notes.append, save_every_s=0, **options
        )  # fmt: skip
    return notes


@pytest.mark.parametrize("validation", [0.3, 1e-12])  # or one document, in a second pass
@pytest.mark.usefixtures("small_batches")
def test_a_killed_build_is_continued_to_the_same_bytes(
    corpus: list[Path], tmp_path: Path, validation: float
) -> None:
    options: dict[str, Any] = {"fields": PAIR, "validation": validation, "shard_tokens": 900}
    build(corpus, tmp_path / "whole", **options)
    expected = contents(tmp_path / "whole")
    assert len(expected) > 8  # several shards with masks
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    for stop in (10, 40, 41, 90, 117):
        build_until(stop, corpus, out, **options)
        assert not out.exists()
        # What a kill may leave behind: more bytes, and files that the state does not know.
        state = json.loads((partial / "state.json").read_text())
        complete = {x["file"] for writer in state["writers"].values() for x in writer["shards"]}
        for path in {x for x in partial.glob("*.bin") if x.name not in complete}:
            with path.open("ab") as file:
                file.write(b"more")
        (partial / "train-00099.bin").write_bytes(b"more")
    notes: list[str] = []
    build(corpus, out, on_note=notes.append, **options)
    assert contents(out) == expected
    assert not partial.exists()
    if validation > 0.1:
        assert notes == ["continuing an unfinished build after 108 documents"]


@pytest.mark.usefixtures("small_batches")
def test_a_build_of_other_input_or_options_begins_anew(corpus: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    build_until(50, corpus, out, fields=PAIR)
    notes = build_until(50, corpus, out, fields=Fields("a"))
    discarded = "an unfinished build of other input or options is discarded"
    assert notes == [discarded, f"{out} is not finished: the same command continues"]
    corpus[0].write_text(corpus[0].read_text() + json.dumps({"q": "new", "a": "line"}) + "\n")
    notes = []
    build(corpus, out, fields=Fields("a"), on_note=notes.append)
    assert notes == [discarded]
    build(corpus, tmp_path / "whole", fields=Fields("a"))
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("damage", ["state", "shard"])
def test_a_damaged_unfinished_build_begins_anew(
    corpus: list[Path], tmp_path: Path, damage: str
) -> None:
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    build_until(50, corpus, out, fields=PAIR)
    if damage == "state":
        (partial / "state.json").write_text("{")
    else:
        (partial / "train-00000.bin").unlink()
    notes: list[str] = []
    build(corpus, out, fields=PAIR, on_note=notes.append)
    assert "discarded" in notes[0]
    build(corpus, tmp_path / "whole", fields=PAIR)
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.usefixtures("small_batches")
def test_bad_input_leaves_nothing_behind(corpus: list[Path], tmp_path: Path) -> None:
    corpus[1].write_text(corpus[1].read_text() + "no JSON")
    with pytest.raises(UserError, match=r"b\.jsonl, line 61 is not JSON"):
        build(corpus, tmp_path / "out", fields=PAIR, save_every_s=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl"]


def test_a_second_build_of_the_same_folder_is_refused(corpus: list[Path], tmp_path: Path) -> None:
    def again(count: int, tokens: int, fraction: float) -> None:
        with pytest.raises(UserError, match="another process builds"):
            build(corpus, tmp_path / "out", fields=PAIR)

    build(corpus, tmp_path / "out", fields=PAIR, on_document=again)
    assert (tmp_path / "out" / "index.json").exists()


def word_tokenizer(folder: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {"</s>": 0, "?": 1} | {f"answer{n}": n + 2 for n in range(9)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder.mkdir()
    inner.save(str(folder / "tokenizer.json"))
    return folder


def test_several_processes_give_the_same_bytes(
    corpus: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longspan.data.encoding.BATCH_PIECES", 20)
    tokenizer = word_tokenizer(tmp_path / "t")
    for out, workers in (("one", 0), ("two", 2)):
        build(corpus, tmp_path / out, tokenizer=tokenizer, fields=PAIR, workers=workers)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_a_build_that_is_killed_by_the_kernel_is_continued(tmp_path: Path) -> None:
    """A real SIGKILL, in the middle of a document's report."""
    path, out = tmp_path / "in.jsonl", tmp_path / "out"
    path.write_text("".join(json.dumps({"text": f"text {n} " * 30}) + "\n" for n in range(400)))
    script = f"""
import os, signal
from pathlib import Path
import longspan.data.encoding as encoding
from longspan.data.build import build
encoding.BATCH_PIECES = 16
def stop(count, tokens, fraction):
    if count == 300:
        os.kill(os.getpid(), signal.SIGKILL)
build([Path({str(path)!r})], Path({str(out)!r}), save_every_s=0, on_document=stop)
"""
    done = subprocess.run([sys.executable, "-c", script], env=os.environ, check=False)
    assert done.returncode == -signal.SIGKILL
    notes: list[str] = []
    build([path], out, on_note=notes.append)
    assert notes == ["continuing an unfinished build after 288 documents"]
    build([path], tmp_path / "whole")
    assert contents(out) == contents(tmp_path / "whole")

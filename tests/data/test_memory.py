"""The memory of `longspan data build` on 2 GB of JSON Lines: `make data`."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.slow import slow

SIZE = 2 << 30
LIMIT = 500 << 20


def write_lines(path: Path, size: int) -> int:
    """Write so many bytes of documents of a few hundred to a few ten thousand words."""
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(1, 9))) for _ in range(20_000)]
    stretches = [" ".join(rng.choices(words, k=100)) for _ in range(2_000)]
    count = 0
    with path.open("w") as file:
        while file.tell() < size:
            pieces = rng.choices(stretches, k=int(rng.paretovariate(1.2)) % 300 + 1)
            file.write(json.dumps({"text": " ".join(pieces)}) + "\n")
            count += 1
    return count


def train_tokenizer(folder: Path, sample: Path) -> Path:
    """A byte-level BPE of 8,000 tokens, as language models have it."""
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=8000, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    with sample.open() as lines:
        inner.train_from_iterator((next(lines) for _ in range(500)), trainer)
    folder.mkdir()
    inner.save(str(folder / "tokenizer.json"))
    return folder


def resident_bytes(process: int) -> int:
    """What a process and its children have in memory; shared pages count once for each."""
    total = 0
    for each in [process, *_children(process)]:
        try:
            status = Path(f"/proc/{each}/status").read_text()
        except OSError:
            continue  # it is gone
        rows = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        total += int(rows.get("VmRSS", "0 kB").split()[0]) << 10
    return total


def _children(process: int) -> list[int]:
    try:
        text = Path(f"/proc/{process}/task/{process}/children").read_text()
    except OSError:
        return []
    direct = [int(each) for each in text.split()]
    return [*direct, *(inner for each in direct for inner in _children(each))]


@slow("data")
@pytest.mark.parametrize("kind", ["bytes", "tokenizer"])
def test_two_gigabytes_are_built_in_less_than_500_megabytes(tmp_path: Path, kind: str) -> None:
    path, out = tmp_path / "in.jsonl", tmp_path / "out"
    documents = write_lines(path, SIZE)
    options = []
    if kind == "tokenizer":
        options = ["--tokenizer", str(train_tokenizer(tmp_path / "t", path)), "--workers", "2"]
    command = [sys.executable, "-m", "longspan", "data", "build", str(path), "-o", str(out)]
    build = subprocess.Popen([*command, *options], env=os.environ)
    peak, is_over = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_over.wait(0.05):
            peak = max(peak, resident_bytes(build.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    code = build.wait()
    is_over.set()
    watcher.join()
    print(f"{kind}: {path.stat().st_size:,} bytes, {documents:,} documents, peak {peak >> 20} MiB")
    assert code == 0
    assert (out / "index.json").exists()
    assert 0 < peak < LIMIT

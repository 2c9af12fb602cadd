"""Folders of shards that an attacker made: fields change, and the hashes are recomputed."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longspan.constants import IGNORE_INDEX
from longspan.data import open_source
from longspan.data.build import build
from longspan.data.source import TokenSource
from longspan.errors import UserError
from longspan.runfile import load_run
from tests.test_fuzz import files_below, mutated
from tests.test_security import CASES

WORDS = [f"w{n}" for n in range(300)]
CONTEXT = 16
OPTIONS = [f"data.context={CONTEXT}", "data.documents=join"]
MAX_KIB = 1 << 20


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """Shards of words, in uint16, with a tokenizer."""
    tokenizers = pytest.importorskip("tokenizers")
    root = tmp_path / "original"
    root.mkdir()
    ids = {word: n for n, word in enumerate([*WORDS, "<eos>"])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="<eos>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(root / "tokenizer.json"))
    rng = random.Random(0)
    texts = [" ".join(rng.choices(WORDS, k=20 + n)) for n in range(12)]
    (root / "in.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    out = root / "shards"
    tokenizer = root / "tokenizer.json"
    build([root / "in.jsonl"], out, tokenizer=tokenizer, validation=0.3, shard_tokens=90)
    return out


def attacked(folder: Path, index: Any, rng: random.Random) -> Any:
    """Change the index, and perhaps the shards, as someone who knows the format would."""
    shards = index.get("shards") if isinstance(index, dict) else None
    shard = rng.choice(shards) if isinstance(shards, list) and shards else None
    path = folder / "train-00000.bin"
    kinds = 12 if path.is_file() and path.stat().st_size > 80 else 9
    match rng.randrange(kinds) if isinstance(shard, dict) else 0:
        case 1:
            shards.append(dict(shard))
        case 2:
            rng.shuffle(shards)
        case 3:
            index["vocab"] = rng.choice([1, 299, 300, 301, 302, 70_000, 1 << 24, 1 << 32])
        case 4:
            index["dtype"] = rng.choice(["uint8", "uint16", "uint32"])
        case 5 if isinstance(shard.get("document_ends"), list):
            ends = shard["document_ends"]
            at = rng.randrange(len(ends) or 1)
            ends[at : at + 1] = [rng.choice([-1, 0, 1, 2, 5, 10**9, 2**63, shard.get("tokens")])]
        case 6:
            shard["split"] = rng.choice(["train", "validation"])
        case 7:
            shard["tokens"] = rng.choice([1, 2, 40, 10**9, 2**48, -1])
            shard["document_ends"] = [shard["tokens"]]
        case 8:
            shard["file"] = rng.choice(["train-00000.bin", "validation-00000.bin", "x.bin", "a/b"])
        case 9:  # tokens that the vocabulary does not have
            tokens = np.fromfile(path, "<u2")
            tokens[rng.randrange(len(tokens))] = rng.choice([300, 301, 65_535])
            path.write_bytes(tokens.tobytes())
        case 10:
            kept = rng.choice([0, 1, 2, 40, 10_000])
            os.truncate(path, 2 * kept)
            shard |= {"file": path.name, "tokens": kept, "document_ends": [kept]}
        case 11:
            path.unlink()
            made = path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero")
            rng.choice(made)()
        case _:
            return mutated(index, rng)
    return index


def with_hashes(folder: Path, index: Any) -> Any:
    """Compute the SHA-256 of every shard again, as an attacker can."""
    shards = index.get("shards") if isinstance(index, dict) else None
    for shard in shards if isinstance(shards, list) else []:
        if isinstance(shard, dict) and isinstance(shard.get("file"), str):
            path = os.path.join(folder, shard["file"])
            if os.path.isfile(path):
                shard["sha256"] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return index


def check_samples(folder: Path, index: dict[str, Any], source: TokenSource) -> None:
    """What is accepted is what the files say, read here by the description of the format alone."""
    for split in ("train", "validation"):
        shards = [shard for shard in index["shards"] if shard["split"] == split]
        size = {"uint8": 1, "uint16": 2, "uint32": 4}[index["dtype"]]
        content = [(folder / shard["file"]).read_bytes() for shard in shards]
        assert [len(x) for x in content] == [shard["tokens"] * size for shard in shards]
        stream = np.frombuffer(b"".join(content), f"<u{size}").astype(np.int64)
        assert stream.max(initial=0) < index["vocab"]
        lasts, offset = set(), 0
        for shard in shards:
            lasts |= {offset + end - 1 for end in shard["document_ends"]}
            offset += shard["tokens"]
        assert source.splits[split].total == offset == len(stream)
        windows = source.num_windows(split)
        samples = [source.sample(0, n) for n in range(windows)] if split == "train" else []
        samples = samples or source.validation_samples(windows)
        expected = []
        for start in range(0, windows * CONTEXT, CONTEXT):
            targets = stream[start + 1 : start + CONTEXT + 1].copy()
            targets[[n for n in range(CONTEXT) if start + n in lasts]] = IGNORE_INDEX
            expected.append((*stream[start : start + CONTEXT], *targets))
        assert sorted((*s.tokens, *s.targets) for s in samples) == sorted(expected)


def test_an_attacked_folder_is_rejected_or_read_as_it_says(original: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("not yours")
    text, rng, rejected = (original / "index.json").read_text(), random.Random(0), 0
    before, folder = files_below(tmp_path), tmp_path / "attacked"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for case in range(CASES):
        shutil.copytree(original, folder)
        index = json.loads(text)
        for _ in range(rng.randint(1, 2)):
            index = attacked(folder, index, rng)
        if rng.random() < 0.8:
            index = with_hashes(folder, index)
        (folder / "index.json").write_text(json.dumps(index))
        try:
            run = load_run(None, [f"data.source={folder}", *OPTIONS])
            source = open_source(run.data, run.model)
            verification = source.verification()
            assert verification is not None
            with verification:
                verification.wait()
            assert isinstance(source, TokenSource)
            check_samples(folder, index, source)
        except UserError:
            rejected += 1
        except Exception as error:
            raise AssertionError(f"case {case}: {json.dumps(index)[:2000]}") from error
        shutil.rmtree(folder)
    assert CASES // 3 < rejected < CASES
    assert files_below(tmp_path) == before
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < MAX_KIB


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_an_attacked_tokenizer_is_rejected_or_works(original: Path, name: str) -> None:
    text, rng, rejected = (original / name).read_text(), random.Random(1), 0
    run = load_run(None, [f"data.source={original}", *OPTIONS])
    for case in range(CASES // 2):
        changed = json.loads(text)
        for _ in range(rng.randint(1, 3)):
            changed = mutated(changed, rng)
        content = json.dumps(changed).encode()
        if rng.random() < 0.2:
            at = rng.randrange(len(content))
            content = content[:at] + rng.randbytes(3) + content[at:]
        (original / name).write_bytes(content)
        try:
            tokenizer = open_source(run.data, run.model).tokenizer
            assert tokenizer is not None
            tokens = tokenizer.encode("w1 w2 unknown")
            assert all(0 <= token < tokenizer.vocab for token in tokens)
            assert tokenizer.eos is None or 0 <= tokenizer.eos < tokenizer.vocab
            tokenizer.decode(tokens)
        except UserError:
            rejected += 1
        except Exception as error:
            raise AssertionError(f"case {case}: {content[:2000]!r}") from error
    assert rejected > CASES // 20

"""Opens the source that [data] of a run file names."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np

from longspan.config import Data, Model
from longspan.config.data import MixedSource
from longspan.data.mixture import MixtureSource, Part
from longspan.data.packing import PackedSource
from longspan.data.samples import Ints
from longspan.data.shards import SPLITS, Shard, ShardFile, Spans, read_index, read_loss
from longspan.data.source import RecallSource, Source, TokenSource
from longspan.data.token_split import TokenSplit
from longspan.data.tokenizer import ByteTokenizer, JsonTokenizer, load_tokenizer
from longspan.data.verification import Verification
from longspan.errors import UserError


def open_source(data: Data, model: Model) -> Source:
    """Open the source that [data] names, and check it against the model's vocabulary."""
    if data.source == "recall":
        return RecallSource(data.context, data.recall_pairs, model.vocab)
    source: TokenSource | MixtureSource
    if data.mix is None:
        source = _open_tokens(data.source, data)
    else:
        source = MixtureSource([_open_part(part, data) for part in data.mix if part.weight])
    if source.vocab > model.vocab:
        raise UserError(
            f"model.vocab must be at least {source.vocab:,}, the vocabulary size of the data, got "
            f"{model.vocab:,}: set model.vocab={source.vocab}"
        )
    return source


def _open_part(part: MixedSource, data: Data) -> Part:
    try:
        source = _open_tokens(part.source, data)
    except UserError as error:
        raise UserError(f"data.mix: {part.source}: {error}") from error
    return Part(part.source, Fraction(str(part.weight)), source)


def _open_tokens(name: str, data: Data) -> TokenSource:
    kind = PackedSource if data.documents == "isolate" else TokenSource
    if name == "builtin":
        return _builtin(data.context, kind)
    return _from_shards(Path(name), data.context, kind)


def _from_shards(folder: Path, context: int, kind: type[TokenSource]) -> TokenSource:
    index = read_index(folder)
    splits: dict[str, TokenSplit] = {}
    for split in SPLITS:
        shards = [shard for shard in index.shards if shard.split == split]
        starts = np.cumsum([0, *(shard.tokens for shard in shards)])
        ends = [
            np.asarray(shard.document_ends, dtype=np.int64) + start
            for shard, start in zip(shards, starts, strict=False)
        ]
        splits[split] = TokenSplit(
            [ShardFile(folder, index, shard) for shard in shards],
            np.concatenate([np.zeros(0, dtype=np.int64), *ends]),
            _read_losses(folder, shards, starts),
        )
    tokenizer, fingerprint = load_tokenizer(folder), index.fingerprint()
    if isinstance(tokenizer, JsonTokenizer):
        fingerprint = hashlib.sha256(f"{fingerprint} {tokenizer.sha256}".encode()).hexdigest()
    verification = partial(Verification, folder, index)
    return kind(splits, context, tokenizer, index.vocab, fingerprint, verification)


def _read_losses(folder: Path, shards: list[Shard], starts: Ints) -> Spans | None:
    """Which tokens of a split have a loss; None for all. `starts`: where each shard begins."""
    if not any(shard.loss for shard in shards):
        return None
    found = [read_loss(folder, shard) for shard in shards]
    all_tokens = [np.array([[0, shard.tokens]]) for shard in shards]
    spans = [all_tokens[n] if x is None else x for n, x in enumerate(found)]
    return np.concatenate([x + start for x, start in zip(spans, starts, strict=False)])


def _builtin(context: int, kind: type[TokenSource]) -> TokenSource:
    """Read the standard library's .py files; a hash of the name puts 1 in 20 into validation."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    digest = hashlib.sha256()
    documents: dict[str, list[bytes]] = {"train": [], "validation": []}
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - skipped  # site-packages may hold ten thousand files
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    for path in sorted(paths):
        name, content = path.relative_to(root), path.read_bytes()
        if not content:
            continue
        in_validation = hashlib.sha256(name.as_posix().encode()).digest()[0] < 13
        documents["validation" if in_validation else "train"].append(content + b"\0")
        digest.update(content)
    splits = {
        split: TokenSplit(
            [np.frombuffer(b"".join(texts), dtype=np.uint8)],
            np.cumsum([len(text) for text in texts], dtype=np.int64),
        )
        for split, texts in documents.items()
    }
    tokenizer = ByteTokenizer()
    return kind(splits, context, tokenizer, tokenizer.vocab, digest.hexdigest())

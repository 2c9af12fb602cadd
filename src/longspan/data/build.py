"""`longspan data build`: tokenize text, JSON Lines, Parquet and Arrow into token shards.

Memory is bounded: of a document that is longer than a piece, one piece after the other is read,
encoded and written; of JSON Lines, one line; of Parquet and Arrow, a few hundred records.

A build that is killed is continued by the same command. It is written in a hidden folder next to
`out`, in which a small file says from time to time up to which document all is on disk; what was
written after that is cut off. So the bytes are those of a build that was never killed.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from longspan.data.building import SAVE_EVERY_S, Building, OnDocument, partial_folder
from longspan.data.chat import ChatTemplate
from longspan.data.documents import Fields
from longspan.data.reading import InputFile, Reader, find_files
from longspan.data.shards import FORMAT, Index
from longspan.data.tokenizer import TOKENIZER, ByteTokenizer, JsonTokenizer, Tokenizer
from longspan.errors import UserError
from longspan.vocabulary import INDEX

MANY_BYTES = 1 << 25
"""An input from this size on is encoded by several processes."""


def build(
    inputs: list[Path],
    out: Path,
    *,
    tokenizer: Path | None = None,
    eos: str | None = None,
    fields: Fields = Fields(),  # noqa: B008 (it is frozen)
    validation: float = 0.05,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    shard_tokens: int = 1 << 27,
    workers: int | None = 0,
    save_every_s: float = SAVE_EVERY_S,
    on_document: OnDocument = lambda documents, tokens, fraction: None,
    on_note: Callable[[str], None] = lambda text: print(f"longspan: {text}", file=sys.stderr),
) -> Index:
    """Write the documents of `inputs` as token shards into the new folder `out`.

    A hash of its text assigns a document to the train or validation split, so duplicates are never
    in both, and building the same text twice gives the same files. `include` and `exclude` select
    files of folders. `workers` processes encode, none in this process alone; None is one for each
    core if the input is large. `on_document` is called after each document with the number of
    documents and tokens so far and the fraction of the input that is read; `on_note` with what the
    user should know, such as files that were skipped.
    """
    if out.exists():
        raise UserError(f"{out} already exists: choose another folder, or remove it")
    if not 0 <= validation < 1:
        raise UserError(f"--validation must be at least 0 and below 1, got {validation}")
    if workers is not None and workers < 0:
        raise UserError(f"--workers must be at least 0, got {workers}")
    encoder = _open_tokenizer(tokenizer, eos, on_note)
    template = _open_template(tokenizer) if fields.chat is not None else None
    names = ", ".join(map(str, inputs))
    try:
        files = find_files(inputs, include, exclude, on_note)
        reader = Reader(files, fields, template)
        if isinstance(encoder, ByteTokenizer):
            workers = 0  # it takes no time
        elif workers is None:
            workers = min(os.cpu_count() or 1, 8) if reader.total_bytes >= MANY_BYTES else 0
        identity = encoder.sha256 if isinstance(encoder, JsonTokenizer) else encoder.name
        options = [str(fields), identity, encoder.eos, validation, shard_tokens]
        key = _key(files, [*options, template.source if template else None])
        with partial_folder(out, on_note) as folder:
            building = Building(folder, encoder, shard_tokens, save_every_s)
            building.begin(key, max(int(validation * 2**64), validation > 0), on_note)
            building.write(reader, workers, on_document)
            is_split = building.lowest < building.highest
            if validation and not building.has("validation") and is_split:
                # Few documents: take the one with the lowest hash, and with it its duplicates.
                building.begin_again(building.lowest + 1)
                building.write(reader, workers, on_document)
            elif not building.has("train") and building.highest >= 0:
                # All hashes are low: those of the highest are for training.
                building.begin_again(building.highest)
                building.write(reader, workers, on_document)
            if not building.has("train"):
                raise UserError(f"found no text for the train split in {names}")
            if not building.writers["train"].targets:
                raise UserError(f"no token of the train split has a loss in {names}")
            if not building.has("validation"):
                on_note(
                    "the validation split is empty, so that a run has no validation loss: "
                    + ("--validation is 0" if not validation else "expected at least two documents")
                )
            if isinstance(encoder, JsonTokenizer):
                encoder.save(folder)
            index = building.index()
            text = index.model_dump_json(exclude_none=True)
            (folder / INDEX).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot build {out}: {error.filename or out}: {error.strerror}") from error
    return index


def _key(files: Sequence[InputFile], options: list[Any]) -> str:
    """What an unfinished build must have been of, to be continued."""
    found = []
    for file in files:
        status = os.stat(file.path)
        found.append([str(file.path.absolute()), status.st_size, status.st_mtime_ns, file.split])
    return hashlib.sha256(json.dumps([FORMAT, found, options]).encode()).hexdigest()


def _open_template(tokenizer: Path | None) -> ChatTemplate:
    if tokenizer is None:
        raise UserError("--chat needs a tokenizer folder with a chat template: set --tokenizer")
    return ChatTemplate(tokenizer if tokenizer.is_dir() else tokenizer.parent)


def _open_tokenizer(
    path: Path | None, eos: str | None, on_note: Callable[[str], None]
) -> Tokenizer:
    if path is None:
        if eos is not None:
            raise UserError("--eos names a token of --tokenizer; for bytes it is NUL: remove it")
        return ByteTokenizer()
    found = JsonTokenizer(path / TOKENIZER if path.is_dir() else path, eos=eos)
    if found.eos is None:
        on_note(
            f"the tokenizer {path} has no end-of-text token ({', '.join(found.EOS_NAMES)}): "
            "documents follow each other without a mark, unless --eos names one of its tokens"
        )
    return found

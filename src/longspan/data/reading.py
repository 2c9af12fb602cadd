"""Finds the files of an input, and reads documents out of them, one after the other.

Text, JSON Lines, both also compressed, Parquet, Arrow, and datasets that Hugging Face has saved.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import Any

from longspan.data.documents import (
    Document,
    Fields,
    Split,
    Template,
    cut,
    document_of,
    streamed,
)
from longspan.data.encoding import Place
from longspan.data.open_input import (
    COLUMNAR,
    COMPRESSED,
    dataset_files,
    is_json_array,
    json_lines_in,
    open_stream,
    read_columnar,
)
from longspan.errors import UserError
from longspan.wording import counted

MAX_LINE_BYTES = 1 << 27
"""Longest line of JSON Lines, which is parsed as a whole."""

_VALIDATION_NAMES = ("validation", "valid", "val", "dev", "test")


@dataclass(frozen=True)
class InputFile:
    """A file of the input."""

    path: Path
    within: Path | None
    """The folder of the input that links may not leave."""
    bytes: int
    split: Split | None = None
    """Set if the input names its split."""


def find_files(
    inputs: list[Path],
    include: Sequence[str],
    exclude: Sequence[str],
    on_note: Callable[[str], None],
) -> list[InputFile]:
    """Find the files of the inputs; what cannot be used is refused, or skipped with a note."""
    files: list[InputFile] = []
    skipped: dict[str, list[Path]] = {}
    for path in inputs:
        try:
            found = path.stat()
        except (OSError, ValueError) as error:
            raise UserError(f"no such file or folder: {path}") from error
        if stat.S_ISREG(found.st_mode):
            if not _is_text(path, None):
                raise UserError(f"{path} is not text: it contains NUL bytes")
            files.append(InputFile(path, None, found.st_size))
        elif not stat.S_ISDIR(found.st_mode):
            raise UserError(f"{path} is neither a regular file nor a folder")
        elif (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            files += _find_dataset(path)
        else:
            files += _find_below(path, include, exclude, skipped)
    for reason, paths in skipped.items():
        on_note(f"skipped {counted(len(paths), 'file')} ({reason}), such as {paths[0]}")
    return files


def _find_below(
    folder: Path, include: Sequence[str], exclude: Sequence[str], skipped: dict[str, list[Path]]
) -> list[InputFile]:
    """Find the text files below `folder`, hidden ones excluded, in path order."""

    def skip(reason: str, path: Path) -> None:
        skipped.setdefault(reason, []).append(path)

    def unreadable(error: OSError) -> None:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from error

    paths: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [Path(parent, name) for name in names if not name.startswith(".")]
        for name in folders:
            if Path(parent, name).is_symlink():  # which os.walk does not enter
                skip("links to folders", Path(parent, name))
    files, root = [], folder.resolve()
    for path in sorted(paths):
        relative = path.relative_to(folder)
        if (include and not _matches(relative, include)) or _matches(relative, exclude):
            continue
        if path.is_symlink() and not _stays_within(path, root):
            skip("links out of the input folder", path)
        elif not path.is_file():
            skip("not regular: FIFO, device, socket or broken link", path)
        elif not path.stat().st_size:
            continue
        else:
            if _is_text(path, folder):
                files.append(InputFile(path, folder, path.stat().st_size))
            else:
                skip("not text: NUL bytes", path)
    return files


def _matches(path: Path, patterns: Sequence[str]) -> bool:
    """Whether the name, or for a pattern with a slash the path in the input folder, matches one."""
    names = path.name, path.as_posix()
    return any(fnmatch(names["/" in pattern], pattern) for pattern in patterns)


def _stays_within(path: Path, root: Path) -> bool:
    try:
        return path.resolve().is_relative_to(root)
    except (OSError, RuntimeError):  # links in a circle
        return False


def _find_dataset(folder: Path) -> list[InputFile]:
    """The files of a dataset that Hugging Face has saved, whose own validation split is kept."""
    found = dataset_files(folder)
    names_validation = any(name in _VALIDATION_NAMES for name, _ in found)
    files = []
    for name, path in found:
        split: Split | None = "train" if names_validation else None
        if name in _VALIDATION_NAMES:
            split = "validation"
        try:
            files.append(InputFile(path, folder, path.stat().st_size, split))
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
    return files


def _is_text(path: Path, within: Path | None) -> bool:
    """Whether it is text, or of a format that is read."""
    if path.suffix.lower() in COLUMNAR:
        return True
    with open_stream(path, within) as (file, _):
        return b"\0" not in file.read(1 << 16)


class Reader:
    """Reads the documents of files, one after the other."""

    def __init__(
        self, files: Sequence[InputFile], fields: Fields, template: Template | None = None
    ) -> None:
        self._files, self._fields, self._template = files, fields, template
        self.total_bytes = sum(file.bytes for file in files)
        self._read = 0.0

    @property
    def fraction(self) -> float:
        """How much of the input is read."""
        return self._read / self.total_bytes if self.total_bytes else 0.0

    def documents(self, start: Place = Place()) -> Iterator[tuple[Document, Place]]:  # noqa: B008
        """The documents after `start`, each with the place where it ends."""
        before = 0
        for number, file in enumerate(self._files):
            if number < start.file:
                before += file.bytes
                continue
            done = start.document if number == start.file else 0
            found = islice(enumerate(self._documents_of(file, before), 1), done, None)
            for count, document in found:
                yield document(), Place(number, count)
            before += file.bytes
            self._read = before

    def _documents_of(self, file: InputFile, before: int) -> Iterator[Callable[[], Document]]:
        """Functions that make the documents of a file: those that are passed over are not made."""
        if file.path.suffix.lower() in COLUMNAR:
            yield from self._from_columnar(file, before)
        elif json_lines_in(file.path, file.within, self._fields.names[0], MAX_LINE_BYTES):
            yield from self._from_json_lines(file, before)
        else:
            self._check_is_text(file)
            self._read = before + file.bytes
            yield lambda: _from_text(file)

    def _check_is_text(self, file: InputFile) -> None:
        """Refuse a file without records where records are meant: it would have a loss on all."""
        if file.within is None and is_json_array(file.path, None):
            raise UserError(
                f"{file.path} is a JSON array: expected JSON Lines, one object per line, as "
                f"jq -c '.[]' {shlex.quote(str(file.path))} writes them"
            )
        if self._fields.has_mask:
            raise UserError(
                f"{file.path} has no records, but --prompt, --loss and --chat name their fields: "
                "leave it out, with --exclude if it is in a folder"
            )

    def _from_json_lines(self, file: InputFile, before: int) -> Iterator[Callable[[], Document]]:
        with open_stream(file.path, file.within) as (lines, read):
            for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE_BYTES + 1), b""), 1):
                self._read = before + min(read(), file.bytes)
                where = f"{file.path}, line {number}"
                if len(line) > MAX_LINE_BYTES:
                    raise UserError(
                        f"{where} has more than {MAX_LINE_BYTES:,} bytes: split the document"
                    )
                if line.strip():
                    yield lambda line=line, where=where: self._document(  # type: ignore[misc]
                        _parsed(line, where), where, file.split
                    )

    def _from_columnar(self, file: InputFile, before: int) -> Iterator[Callable[[], Document]]:
        number = 0
        for records, fraction in read_columnar(file.path, file.within, self._fields.names):
            self._read = before + fraction * file.bytes
            for record in records:
                number += 1
                where = f"{file.path}, record {number}"
                yield lambda record=record, where=where: self._document(  # type: ignore[misc]
                    record, where, file.split
                )

    def _document(self, record: Any, where: str, split: Split | None) -> Document:
        return document_of(record, self._fields, where, split, self._template)


def _parsed(line: bytes, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {error}") from error


def _from_text(file: InputFile) -> Document:
    def pieces() -> Iterator[str]:
        try:
            with (
                open_stream(file.path, file.within) as (raw, _),
                io.TextIOWrapper(raw, encoding="utf-8-sig") as text,
            ):
                yield from cut(text.read)
        except UnicodeDecodeError as error:
            raise UserError(f"{file.path} is not UTF-8 text: {error}") from error

    is_compressed = file.path.suffix.lower() in COMPRESSED  # of unknown size: read piece by piece
    return Document(pieces) if is_compressed else streamed(pieces, file.bytes)

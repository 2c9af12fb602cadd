"""Reads documents out of text files, JSON Lines and Hugging Face datasets, one after the other."""

from __future__ import annotations

import io
import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from longspan.data.documents import Document, Fields, Split, cut, document_of, streamed
from longspan.errors import UserError
from longspan.files import open_regular
from longspan.wording import counted

MAX_LINE_BYTES = 1 << 27
"""Longest line of JSON Lines, which is parsed as a whole."""

_VALIDATION_NAMES = ("validation", "valid", "val", "dev", "test")
_UNSUPPORTED = {
    **dict.fromkeys((".parquet", ".arrow", ".feather"), "convert it to JSON Lines"),
    **dict.fromkeys((".gz", ".bz2", ".xz", ".zst"), "decompress it"),
}


@dataclass(frozen=True)
class InputFile:
    """A file of the input, or the folder of a Hugging Face dataset."""

    path: Path
    within: Path | None
    """The folder of the input that links may not leave."""
    bytes: int
    is_dataset: bool = False


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
            _check_supported(path)
            if not _is_text(path, None):
                raise UserError(f"{path} is not text: it contains NUL bytes")
            files.append(InputFile(path, None, found.st_size))
        elif not stat.S_ISDIR(found.st_mode):
            raise UserError(f"{path} is neither a regular file nor a folder")
        elif (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            files.append(InputFile(path, path, 0, is_dataset=True))
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
            _check_supported(path)
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


def _check_supported(path: Path) -> None:
    suffix = path.suffix.lower()
    if suffix in _UNSUPPORTED:
        raise UserError(
            f"{path}: {suffix[1:]} files are not supported: {_UNSUPPORTED[suffix]} first, or skip "
            f"such files of a folder with --exclude '*{suffix}'"
        )


def _is_text(path: Path, within: Path | None) -> bool:
    with open_regular(path, within=within) as file:
        return b"\0" not in file.read(1 << 16)


class Reader:
    """Reads the documents of files, one after the other."""

    def __init__(self, files: Sequence[InputFile], fields: Fields) -> None:
        self._files, self._fields = files, fields
        self._total = sum(file.bytes for file in files)
        self._read = 0

    @property
    def fraction(self) -> float:
        """How much of the input is read; that of datasets is not known, and counts as nothing."""
        return self._read / self._total if self._total else 0.0

    def documents(self) -> Iterator[Document]:
        self._read = 0
        for file in self._files:
            before = self._read
            if file.is_dataset:
                yield from _from_hf(file.path, self._fields)
            elif _is_json_lines(file, self._fields):
                yield from self._from_json_lines(file)
            else:
                self._read += file.bytes
                yield _from_text(file)
            self._read = before + file.bytes

    def _from_json_lines(self, file: InputFile) -> Iterator[Document]:
        with open_regular(file.path, within=file.within) as lines:
            for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE_BYTES + 1), b""), 1):
                self._read += len(line)
                where = f"{file.path}, line {number}"
                if len(line) > MAX_LINE_BYTES:
                    raise UserError(
                        f"{where} has more than {MAX_LINE_BYTES:,} bytes: split the document"
                    )
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise UserError(f"{where} is not JSON: {error}") from error
                yield document_of(record, self._fields, where)


def _is_json_lines(file: InputFile, fields: Fields) -> bool:
    """Whether a file is JSON Lines, by its name or, if that is .json, by its first two lines."""
    if file.path.suffix in (".jsonl", ".ndjson"):
        return True
    if file.path.suffix != ".json":
        return False
    with open_regular(file.path, within=file.within) as lines:
        try:
            first = json.loads(lines.readline(MAX_LINE_BYTES))
            if not isinstance(first, dict):
                return False
            following = lines.readline(MAX_LINE_BYTES).strip()
            return isinstance(json.loads(following), dict) if following else fields.main in first
        except (ValueError, RecursionError):
            return False


def _from_text(file: InputFile) -> Document:
    def pieces() -> Iterator[str]:
        try:
            with (
                open_regular(file.path, within=file.within) as raw,
                io.TextIOWrapper(raw, encoding="utf-8") as text,
            ):
                yield from cut(text.read)
        except UnicodeDecodeError as error:
            raise UserError(f"{file.path} is not UTF-8 text: {error}") from error

    return streamed(pieces, file.bytes)


def _from_hf(path: Path, fields: Fields) -> Iterator[Document]:
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"{path} is a Hugging Face dataset: pip install 'longspan[hf]' to read it"
        ) from error
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # the library and Arrow raise many kinds
        raise UserError(f"{path} is not a readable Hugging Face dataset: {error}") from error
    splits = dict(loaded) if isinstance(loaded, datasets.DatasetDict) else {None: loaded}
    names_validation = any(name in _VALIDATION_NAMES for name in splits)
    for name, records in splits.items():
        split: Split | None = "train" if names_validation else None
        if name in _VALIDATION_NAMES:
            split = "validation"
        for number, record in enumerate(records):
            yield document_of(record, fields, f"{path}, record {number}", split)

"""Writing and checking files so that what is there is whole."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A temporary folder that becomes `target` when the block ends well and vanishes when not.

    Every file in it is fsynced before the rename and the parent after it, so that a crash at any
    moment leaves either no `target` or a whole one.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.parent / f".{target.name}.{os.getpid()}.tmp"
    draft.mkdir()
    try:
        yield draft
        for path in [*draft.iterdir(), draft]:
            fsync(path)
        draft.rename(target)
        fsync(target.parent)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a crash leaves either the old one or the whole new one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    draft.write_text(text, encoding="utf-8")
    fsync(draft)
    draft.replace(path)


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

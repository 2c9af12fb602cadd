"""Atomic writes, checksums and JSON lines: a file under its final name is always complete."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longspan.errors import UserError


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `target` on success and deleted on an exception.

    Every file in it is fsynced before the rename and the parent after it, so a crash at any moment
    leaves either no `target` or a complete one.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".{target.name}.{os.getpid()}.tmp"
    temporary.mkdir()
    try:
        yield temporary
        for path in [*temporary.iterdir(), temporary]:
            fsync(path)
        temporary.rename(target)
        fsync(target.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def atomic_write_text(path: Path, text: str) -> None:
    """Replace a file's text; a crash leaves either the old file or the complete new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    fsync(temporary)
    temporary.replace(path)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a JSON Lines file, without lines that a crash truncated."""
    if not path.exists():
        return []
    objects = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            value = json.loads(text)
        except ValueError:
            continue
        if isinstance(value, dict):
            objects.append(value)
    return objects


def read_json_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """Read a JSON object from a file that others wrote; what is wrong with it is a UserError."""
    if not os.path.isfile(path):
        missing = "does not exist" if not os.path.lexists(path) else "is not a regular file"
        raise UserError(f"cannot read {path}: it {missing}")
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise UserError(f"cannot read {path}: it has more than {max_bytes:,} bytes")
        found = json.loads(content, parse_constant=_refuse_constant)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: expected a JSON object, got a {type(found).__name__}")
    return found


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Atomic writes, checksums and JSON lines: a file under its final name is always complete."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from longspan.errors import UserError
from longspan.wording import shown


def sha256_of(path: Path, *, within: Path | None = None) -> str:
    """Return the SHA-256 of a file, in hexadecimal; `within` as in `open_regular`."""
    digest = hashlib.sha256()
    with open_regular(path, within=within) as file:
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


def write_new(text: str, out: Path) -> None:
    """Write a new file that the user has named, and refuse to replace one."""
    try:
        file = out.open("x", encoding="utf-8")
        try:
            with file:
                file.write(text)
        except OSError:
            out.unlink()
            raise
    except FileExistsError as error:
        raise UserError(f"{out} already exists: choose another name with -o") from error
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from error


def atomic_write_text(path: Path, text: str) -> None:
    """Replace a file's text; a crash leaves either the old file or the complete new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        fsync(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


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


MAX_LINE_BYTES = 1 << 20
"""Length of a line of a JSON Lines file that others wrote; ours have some hundred bytes."""


def json_lines(path: Path, max_bytes: int) -> Iterator[dict[str, Any] | None]:
    """Read the objects in the first `max_bytes` of a JSON Lines file that others wrote.

    Yields None for a line that is no JSON object, is too long or nested too deep, or was truncated
    by a crash. Raises
    OSError like `open_regular`.
    """
    with open_regular(path) as file:
        left = max_bytes
        while left > 0 and (line := file.readline(min(left, MAX_LINE_BYTES))):
            left -= len(line)
            try:
                value = json.loads(line) if line.strip() else None
                if line.count(b"{") + line.count(b"[") > MAX_JSON_DEPTH:
                    check_depth(value)
            except (ValueError, RecursionError):
                value = None
            yield value if isinstance(value, dict) else None


MAX_JSON_DEPTH = 32
"""Nesting of a JSON file; ours and those of Hugging Face have less than ten levels."""
MAX_HEADER_BYTES = 16 << 20
"""Size of a safetensors header: about a hundred thousand tensors."""
MAX_JSON_VALUES = 1 << 25
"""Values in one JSON file. Each takes some 40 bytes when parsed, whatever it is in the file."""
MAX_JSON_CONTAINERS = 1_000_000
"""Objects and lists in one JSON file. Each takes some 100 times its two bytes when parsed."""


def open_regular(path: Path, *, within: Path | None = None) -> BinaryIO:
    """Open a file that others wrote, for reading; raises OSError with words for the user.

    A FIFO, a device or a folder is refused at once, without waiting for a writer. `within`: the
    folder that symbolic links may not leave.
    """
    if "\0" in str(path):
        raise OSError(errno.EINVAL, "its name has a NUL character")
    if within is not None and not _resolved(path).is_relative_to(_resolved(within)):
        raise OSError(errno.EPERM, f"it is a link to a file outside {within}", str(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(code, "it is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except RuntimeError as error:  # links in a circle, before Python 3.13
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from error


def read_bounded(path: Path, max_bytes: int, *, within: Path | None = None) -> bytes:
    """Read a regular file of at most `max_bytes`; anything else is a UserError."""
    try:
        with open_regular(path, within=within) as file:
            content = file.read(max_bytes + 1)
    except FileNotFoundError as error:
        raise UserError(f"cannot read {path}: it does not exist") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if len(content) > max_bytes:
        raise UserError(f"cannot read {path}: it has more than {max_bytes:,} bytes")
    return content


def read_json_bytes(
    path: Path,
    max_bytes: int,
    *,
    max_values: int = MAX_JSON_VALUES,
    within: Path | None = None,
) -> bytes:
    """Read a JSON file whose size and number of values are bounded before anything parses it."""
    content = read_bounded(path, max_bytes, within=within)
    containers = content.count(b"[") + content.count(b"{")
    if containers > MAX_JSON_CONTAINERS:
        most = f"{MAX_JSON_CONTAINERS:,}"
        raise UserError(f"{path} has {containers:,} objects and lists: expected at most {most}")
    if (values := content.count(b",")) > max_values:
        raise UserError(f"{path} has {values:,} values: expected at most {max_values:,}")
    return content


def read_json_object(path: Path, max_bytes: int, *, within: Path | None = None) -> dict[str, Any]:
    """Read a JSON object from a file that others wrote; what is wrong with it is a UserError."""
    content = read_json_bytes(path, max_bytes, within=within)
    try:
        return parse_json_object(content)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def parse_json_object(content: bytes) -> dict[str, Any]:
    """Parse a JSON object of bounded nesting, whose keys are unique and whose numbers are finite.

    Anything else is a ValueError, as readers disagree about it.
    """
    try:
        found = json.loads(
            content.decode("utf-8"),
            parse_constant=_refuse_constant,
            parse_float=_finite,
            object_pairs_hook=_unique_keys,
        )
        if isinstance(found, dict):
            check_depth(found)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object, got a {type(found).__name__}")
    return found


def check_depth(value: Any, left: int = MAX_JSON_DEPTH) -> None:
    """Raise a ValueError for dicts and lists that are nested too deep to be shown or walked."""
    if left == 0:
        raise ValueError(f"it is nested deeper than {MAX_JSON_DEPTH} levels")
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, dict | list):
                check_depth(item, left - 1)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {shown(twice)} occurs twice")
    return found


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:100]} is too large a number")
    return value


def open_safetensors(path: Path, *, within: Path | None = None) -> Any:
    """Open a safetensors file, after bounding its header; what is wrong in it is a UserError.

    safetensors itself checks that shapes, dtypes and offsets add up to the size of the file.
    """
    from safetensors import SafetensorError, safe_open  # late: most verbs read no tensor

    with open_regular(path, within=within) as file:
        length = int.from_bytes(file.read(8), "little")
        size = os.fstat(file.fileno()).st_size
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise UserError(
            f"{path} is not a valid safetensors file: its header would have {length:,} bytes, in a "
            f"file of {size:,}; at most {MAX_HEADER_BYTES:,} are supported"
        )
    try:
        return safe_open(path, "pt")
    except (SafetensorError, MemoryError) as error:  # it maps all of the file, however long
        raise UserError(f"{path} is not a valid safetensors file: {error}") from error


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

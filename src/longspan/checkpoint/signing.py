"""Optional signatures: HMAC-SHA256 of a manifest, by a key that is not in the checkpoint.

Checksums detect damage. Who may write to a run folder can recompute them; without the key nobody
can sign. The manifest holds the SHA-256 of every other file, so its signature covers them too.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from longspan.errors import UserError
from longspan.files import read_bounded

SIGNATURE = "manifest.hmac"
MIN_KEY_BYTES, MAX_KEY_BYTES = 32, 4096


def read_key(path: str | Path) -> bytes | None:
    """Read the key in the file `path`; None for an empty path, which means no signatures."""
    if not str(path):
        return None
    key = read_bounded(Path(path), MAX_KEY_BYTES).strip()
    if len(key) < MIN_KEY_BYTES:
        raise UserError(
            f"the key in {path} has {len(key)} bytes, expected at least {MIN_KEY_BYTES}: "
            f"create one with `openssl rand -hex 32 > {path}`"
        )
    return key


def sign(key: bytes, manifest: bytes) -> str:
    """Return the signature of a manifest's bytes, in hexadecimal."""
    return hmac.new(key, manifest, hashlib.sha256).hexdigest()


def check_signature(path: Path, manifest: bytes, key: bytes) -> None:
    """Raise UserError unless the checkpoint in the folder `path` is signed with `key`."""
    advice = "use the key it was signed with, or another checkpoint"
    try:
        found = read_bounded(path / SIGNATURE, 64, within=path)
    except UserError as error:
        raise UserError(
            f"the checkpoint {path} has no signature, but checkpoint.key_file asks for one: "
            f"{advice} ({error})"
        ) from error
    if not hmac.compare_digest(found, sign(key, manifest).encode()):
        raise UserError(f"the signature of the checkpoint {path} is not by this key: {advice}")

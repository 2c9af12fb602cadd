"""Signed checkpoints: without the key, a recomputed checksum is not enough."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from pathlib import Path

import pytest
import torch

from longspan import checkpoint
from longspan.checkpoint import TensorShard, read_key
from longspan.checkpoint.format import Manifest
from longspan.checkpoint.listing import inspect_checkpoints
from longspan.cli import main
from longspan.errors import Damaged, UserError
from tests.test_cli import SMALL

KEY, OTHER = b"k" * 32, b"o" * 32
SHARDS = {"model/a": TensorShard.full(torch.arange(6.0))}


def forge(path: Path) -> None:
    """Change a checkpoint and recompute its checksum, as anybody can."""
    body = json.loads((path / "manifest.json").read_text())
    body["state"] = {"samples": 3}
    del body["sha256"]
    (path / "manifest.json").write_text(Manifest.model_validate_json(json.dumps(body)).to_text())


def test_the_signature_is_the_hmac_of_the_manifest(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, SHARDS, {}, KEY)
    manifest = (path / "manifest.json").read_bytes()
    expected = hmac.digest(KEY, manifest, hashlib.sha256).hex()
    assert (path / "manifest.hmac").read_text() == expected
    assert not any(KEY in file.read_bytes() for file in path.iterdir())
    for key in (KEY, None):
        checkpoint.open_checkpoint(path, key).check()


@pytest.mark.parametrize("kind", ["unsigned", "other key", "forged", "fifo", "too long", "damaged"])
def test_a_checkpoint_that_is_not_signed_with_the_key_is_refused(tmp_path: Path, kind: str) -> None:
    path = checkpoint.save(tmp_path, 1, SHARDS, {}, OTHER if kind == "other key" else KEY)
    signature = path / "manifest.hmac"
    match kind:
        case "unsigned":
            signature.unlink()
        case "forged":
            forge(path)
            checkpoint.open_checkpoint(path).check()  # all that a checksum can tell
        case "fifo":
            signature.unlink()
            os.mkfifo(signature)
        case "too long":
            signature.write_text(signature.read_text() + "\n")
        case "damaged":
            (path / "manifest.json").write_text("{")
    missing, wrong = "has no signature", "is not by this key"
    expected = {"other key": wrong, "forged": wrong, "damaged": "not valid JSON"}
    with pytest.raises(UserError, match=expected.get(kind, missing)) as raised:
        checkpoint.open_checkpoint(path, KEY)
    # Damage is quarantined, and the checkpoint before it is used; an attack stops the run.
    assert isinstance(raised.value, Damaged) == (kind == "damaged")
    (entry,) = inspect_checkpoints(tmp_path, verify=True, key=KEY)
    assert entry.problem is not None


def test_keys_are_read_from_regular_files(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(KEY + b"\n")
    assert read_key(str(path)) == KEY
    assert read_key("") is None
    for content, message in ((b"short", "5 bytes, expected at least 32"), (b"x" * 5000, "4,096")):
        path.write_bytes(content)
        with pytest.raises(UserError, match=message):
            read_key(path)
    for path in (Path("/dev/zero"), tmp_path, tmp_path / "missing"):
        with pytest.raises(UserError, match="cannot read"):
            read_key(path)


def test_every_verb_that_reads_a_checkpoint_asks_for_the_signature(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, other, run = tmp_path / "key", tmp_path / "other", str(tmp_path / "run")
    key.write_bytes(KEY)
    other.write_bytes(OTHER)
    options = [*SMALL, "attention.kind=dense", "track.prompt="]
    train = ["train", *options, "train.steps=1", f"checkpoint.key_file={key}", "--run-dir", run]
    assert main(train) == 0
    out, more = str(tmp_path / "out"), ["train.steps=2"]
    readers = [
        ["train", "--resume", run, *more],
        ["export", run, out],
        ["generate", run, "--prompt", "a", "--tokens", "1"],
        ["checkpoint", "verify", run],
    ]
    forge(Path(run) / "checkpoints" / "step-00000001")
    for arguments in readers:
        capsys.readouterr()
        assert main(arguments) in (1, 2)
        assert "is not by this key" in "".join(capsys.readouterr())
    # An attacker may also remove the key from the run file.
    file = Path(run) / "run.toml"
    file.write_text(file.read_text().replace(f'key_file = "{key}"', ""))
    for arguments in readers[1:]:
        assert main([*arguments, "--key-file", str(key)]) in (1, 2)
        assert "is not by this key" in "".join(capsys.readouterr())
    assert main([*readers[0], f"checkpoint.key_file={key}"]) == 2
    assert main(readers[3]) == 0, "without a key, only the checksums are checked"

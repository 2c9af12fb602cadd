"""Files that others wrote are opened in one way: regular, bounded, and without links out."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from longspan.errors import UserError
from longspan.files import (
    MAX_HEADER_BYTES,
    open_safetensors,
    parse_json_object,
    read_bounded,
    read_json_bytes,
    read_json_object,
    sha256_of,
)


@pytest.mark.parametrize("read", [read_bounded, read_json_object])
def test_what_is_not_a_regular_file_is_refused_at_once(
    tmp_path: Path, read: Callable[[Path, int], object]
) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    for name in ("fifo", "zero", "folder"):
        with pytest.raises(UserError, match=f"cannot read .*{name}: it is not a regular file"):
            read(tmp_path / name, 1 << 20)
        with pytest.raises(OSError, match="it is not a regular file"):
            sha256_of(tmp_path / name)
    (tmp_path / "circle").symlink_to("circle")
    for name, reason in (("circle", "symbolic links"), ("nothing", "does not exist")):
        with pytest.raises(UserError, match=f"cannot read .*{name}: .*{reason}"):
            read(tmp_path / name, 1 << 20)


def test_links_may_not_leave_a_folder(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "secret").write_text("not yours")
    (tmp_path / "in" / "mine").write_text("mine")
    (tmp_path / "in" / "inside").symlink_to("mine")
    (tmp_path / "in" / "outside").symlink_to("../secret")
    (tmp_path / "link").symlink_to("in")  # the folder itself may be a link
    for folder in (tmp_path / "in", tmp_path / "link"):
        assert read_bounded(folder / "inside", 9, within=folder) == b"mine"
        with pytest.raises(UserError, match="it is a link to a file outside"):
            read_bounded(folder / "outside", 9, within=folder)
    assert read_bounded(tmp_path / "in" / "outside", 9) == b"not yours"


def test_the_size_of_json_is_bounded_before_it_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"a": [1, 2, 3]}))
    assert read_json_object(path, 100) == {"a": [1, 2, 3]}
    with pytest.raises(UserError, match="it has more than 5 bytes"):
        read_json_object(path, 5)
    with pytest.raises(UserError, match="2 values: expected at most 1"):
        read_json_bytes(path, 100, max_values=1)
    path.write_text("[" * 1_000_001)
    with pytest.raises(UserError, match="objects and lists: expected at most"):
        read_json_object(path, 1 << 30)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 50_000, "it is not valid JSON"),
        ('{"a":' + "[" * 40 + "]" * 40 + "}", "nested deeper than 32 levels"),
        ('{"a": 1, "a": 2}', 'the key "a" occurs twice'),
        ('{"a": NaN}', "NaN is not a JSON number"),
        ('{"a": 1e999}', "too large a number"),
        ('{"a": ' + "9" * 5000 + "}", "not valid JSON"),
        ("[]", "expected a JSON object, got a list"),
        ("{", "not valid JSON"),
    ],
)
def test_json_is_bounded(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_json_object(text.encode())


def test_json_must_be_text() -> None:
    with pytest.raises(ValueError, match="not valid JSON"):
        parse_json_object(b'{"a": "\xff"}')


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 100_000,
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,400]}}',
        b'{"a":{"dtype":"F31","shape":[1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[4611686018427387905],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}',
        b"",
    ],
)
def test_headers_of_safetensors_are_checked(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(UserError, match="not a valid safetensors file"):
        open_safetensors(path)


def test_headers_of_safetensors_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.arange(3.0)}, path)
    assert open_safetensors(path).get_tensor("a").tolist() == [0, 1, 2]
    length = MAX_HEADER_BYTES + 8
    content = json.dumps({"a" * 8: {}}).encode().ljust(length)
    path.write_bytes(length.to_bytes(8, "little") + content)
    with pytest.raises(UserError, match="header would have 16,777,224 bytes"):
        open_safetensors(path)
    path.write_bytes(b"abc")
    with pytest.raises(UserError, match="not a valid safetensors file"):
        open_safetensors(path)

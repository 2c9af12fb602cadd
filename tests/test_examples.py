"""Each example trains, and on two processes with the losses of one."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

import pytest
from examples import dataloader, unet

from longspan.cli import main
from longspan.parallel.world import World
from longspan.runfile import ONE_PROCESS, load_run
from longspan.tracking import read_metrics
from longspan.training import train
from tests.harness import Ranks

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = [
    "train.steps=3",
    "train.micro_batch=2",
    "train.global_batch=8",
    "train.warmup_steps=1",
    "train.eval_samples=5",
    "train.device=cpu",
    "train.compile=false",
    "track.log_every=1",
]
DDP, ZERO_3 = ["layout.replicate=2", "layout.shard=1"], ["layout.shard=2"]
LAYOUTS = {
    "unet": DDP,
    "classifier": ZERO_3,
    "huggingface": ZERO_3,
    "sketched": DDP,
    "sketched in a pipeline": ["layout.pipeline=2"],
}
ADAM = ["train.eps=1e-6"]
"""With AdamW's usual epsilon the rounding of tiny gradients shows. The U-Net has its own."""


def train_example(rank: int, world: int, name: str, folder: str, *overrides: str) -> None:
    """Train a few steps of the run file that `name` begins with."""
    options = [*TINY, *([] if name == "unet" else ADAM), *overrides]
    run = load_run(EXAMPLES / f"{name.split()[0]}.toml", options, world=world)
    train(run, Path(folder), world=World(rank, world, rank))


def losses(folder: Path) -> list[float]:
    """The loss of each step, and that of the validation samples."""
    lines = read_metrics(folder / "metrics.jsonl")
    return [line[key] for key in ("loss", "validation_loss") for line in lines if key in line]


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_processes_train_as_one_does(ranks: Ranks, name: str, tmp_path: Path) -> None:
    if name == "huggingface":
        pytest.importorskip("transformers")
    train_example(0, 1, name, str(tmp_path / "one"), *ONE_PROCESS)
    ranks.run(train_example, 2, name, str(tmp_path / "two"), *LAYOUTS[name])
    found = losses(tmp_path / "two")
    assert len(found) >= 3
    assert found == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def train_with_loader(rank: int, world: int, folder: str) -> None:
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)})
    dataloader.trainer(folder, steps=3, device="cpu").train()


def test_a_data_loader_gives_two_processes_the_samples_of_one(ranks: Ranks, tmp_path: Path) -> None:
    dataloader.trainer(str(tmp_path / "one"), steps=3, device="cpu").train()
    ranks.run(train_with_loader, 2, str(tmp_path / "two"))
    found = losses(tmp_path / "two")
    assert found
    assert found == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.toml")), ids=lambda file: file.stem)
def test_every_run_file_can_be_shown(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", str(file)]) == 0
    assert "[model]" in capsys.readouterr().out


def test_the_unet_draws_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unet, "LEVELS", 2)  # so many steps of the sampler
    train_example(0, 1, "unet", str(tmp_path / "run"), "train.steps=2")
    picture = tmp_path / "samples.png"
    unet.draw_samples(str(tmp_path / "run"), str(picture))
    width, height, pixels = read_png(picture.read_bytes())
    assert (width, height) == (8 * 16 * 6, 4 * 16 * 6)  # 32 images in four rows, pixels six wide
    assert len(set(pixels)) > 10


def read_png(data: bytes) -> tuple[int, int, bytes]:
    """The width, height and pixels of a grayscale PNG whose lines have no filter."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, rest = {}, data[8:]
    while rest:
        (length,) = struct.unpack(">I", rest[:4])
        kind, content, rest = rest[4:8], rest[8 : 8 + length], rest[8 + length :]
        assert struct.unpack(">I", rest[:4]) == (zlib.crc32(kind + content),)
        chunks[kind], rest = content, rest[4:]
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, *form = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert form == [8, 0, 0, 0, 0]
    lines = zlib.decompress(chunks[b"IDAT"])
    rows = [lines[start : start + width + 1] for start in range(0, len(lines), width + 1)]
    assert len(rows) == height
    assert all(row[0] == 0 and len(row) == width + 1 for row in rows)
    return width, height, b"".join(row[1:] for row in rows)

"""The backend of a process group: by device, as the run file asks, refused where it cannot be."""

from __future__ import annotations

import os
from pathlib import Path
from typing import get_args
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from longspan.cli.arguments import parse
from longspan.cli.shared import BACKENDS
from longspan.config import Backend, Layout
from longspan.errors import UserError
from longspan.loopback import STORE
from longspan.parallel.mesh import choose_backend, open_mesh
from longspan.parallel.world import World
from longspan.runfile import load_run
from tests.harness import Ranks

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
REPLICAS = {"replicate": 2, "shard": 1}


@pytest.mark.parametrize(
    ("wanted", "device", "expected"),
    [
        ("auto", CPU, "gloo"),
        ("gloo", CPU, "gloo"),
        ("auto", CUDA, "cpu:gloo,cuda:nccl"),
        ("nccl", CUDA, "cpu:gloo,cuda:nccl"),
        ("gloo", CUDA, "gloo"),
        ("mpi", CPU, "mpi"),
    ],
)
def test_the_device_chooses_unless_the_run_file_does(
    monkeypatch: pytest.MonkeyPatch, wanted: str, device: torch.device, expected: str
) -> None:
    for name in ("nccl", "mpi"):  # as in a build that has all
        monkeypatch.setattr(dist, f"is_{name}_available", lambda: True)
    layout = Layout.model_validate({**REPLICAS, "backend": wanted})
    assert choose_backend(layout, 2, device) == expected


@pytest.mark.parametrize(
    ("layout", "device", "words"),
    [
        ({**REPLICAS, "backend": "nccl"}, CPU, '"nccl" connects GPUs, but the device is a CPU'),
        ({"shard": 2, "backend": "gloo"}, CUDA, "as layout.shard = 2 needs"),
        ({"sequence": 2, "backend": "gloo"}, CUDA, "as layout.sequence = 2 needs"),
    ],
)
def test_a_backend_that_cannot_is_refused(
    layout: dict[str, object], device: torch.device, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        choose_backend(Layout.model_validate(layout), 2, device)


@pytest.mark.parametrize(("name", "device"), [("mpi", CPU), ("nccl", CUDA), ("gloo", CPU)])
def test_a_build_without_the_backend_is_said(
    monkeypatch: pytest.MonkeyPatch, name: str, device: torch.device
) -> None:
    monkeypatch.setattr(dist, f"is_{name}_available", lambda: False)
    layout = Layout.model_validate({**REPLICAS, "backend": name})
    with pytest.raises(UserError, match=f"needs {name.upper()}, but PyTorch .* without it"):
        choose_backend(layout, 2, device)


def test_the_run_file_is_refused_before_anything_starts() -> None:
    for overrides, words in (
        (["layout.backend=nccl", "train.device=cpu"], '"nccl" connects GPUs'),
        (["layout.backend=gloo", "train.device=cuda", "layout.shard=2"], "gather or scatter"),
        (["layout.backend=gloo", "engine.name=deepspeed"], 'needs engine.name = "native"'),
        (["layout.backend=ncl"], 'did you mean "nccl"'),
    ):
        with pytest.raises(UserError, match=words):
            load_run(None, overrides, world=2)
    run = load_run(None, ["layout.backend=mpi", "layout.zero=0", "train.device=cpu"], world=2)
    assert not run.replaces_lost_ranks(2)  # which needs gloo


def test_the_option_is_the_override() -> None:
    assert get_args(Backend) == BACKENDS
    assert parse(["train", "--backend", "gloo", "train.steps=1"]).items == [
        "train.steps=1",
        "layout.backend=gloo",
    ]


def open_with_backend(rank: int, world: int, folder: str) -> tuple[str, str]:
    """What a mesh makes where there is no process group, and says where there is another."""
    dist.destroy_process_group()
    layout = Layout.model_validate({"backend": "gloo"})
    with (
        patch.dict(os.environ, {STORE: f"{folder}/store"}),
        open_mesh(layout, World(rank, world, rank), CPU),
    ):
        total = torch.ones(1)
        dist.all_reduce(total)
        assert int(total) == world
        found = dist.get_backend()
        other = Layout.model_validate({"backend": "mpi"})
        with patch.object(dist, "is_mpi_available", lambda: True), pytest.raises(UserError) as said:
            open_mesh(other, World(rank, world, rank), CPU).__enter__()
    store = dist.FileStore(f"{folder}/next", world)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)  # the harness's
    return found, str(said.value)


def test_ranks_communicate_with_the_backend_of_the_run_file(ranks: Ranks, tmp_path: Path) -> None:
    for found, said in ranks.run(open_with_backend, 2, str(tmp_path)):
        assert found == "gloo"
        assert "this process has one of gloo" in said


def test_mpi_numbers_the_ranks_by_itself() -> None:
    """No build with MPI is at hand: what PyTorch is told, and what is compared with its answer."""
    layout = Layout.model_validate({"backend": "mpi"})
    with (
        patch.object(dist, "is_mpi_available", lambda: True),
        patch.object(dist, "init_process_group") as init,
        patch.object(dist, "get_rank", lambda: 1),
        patch.object(dist, "get_world_size", lambda: 2),
        pytest.raises(UserError, match="says rank 0 of 2, but MPI says 1 of 2"),
    ):
        open_mesh(layout, World(0, 2, 0), CPU).__enter__()
    assert init.call_args.args == ("mpi",)
    assert "store" not in init.call_args.kwargs

"""`layout = "auto"` in a run file: what it becomes, when, and that it trains the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.cli import main
from longspan.config import Layout
from longspan.errors import UserError
from longspan.hardware import devices
from longspan.parallel.mesh import open_mesh
from longspan.parallel.world import World
from longspan.planning.search import search
from longspan.runfile import dump_run, load_run, parse_run
from longspan.toml import tomllib
from longspan.training import train
from tests.harness import Ranks

TINY = ["model.hidden=32", "model.heads=2", "data.source=recall", "data.context=64"]
TINY += ["data.recall_pairs=4", "train.steps=3", "train.global_batch=4", "train.eval_samples=2"]
TINY += ["track.prompt=", "train.device=cpu", "track.log_every=1"]


def test_it_stays_unresolved_until_the_number_of_processes_is_known(tmp_path: Path) -> None:
    run = load_run(None, ["layout=auto"], world=None)
    assert run.layout.is_unresolved
    with pytest.raises(AssertionError, match="load_run"):
        run.layout.resolve(2)
    file = tmp_path / "run.toml"
    file.write_text(dump_run(run))
    assert tomllib.loads(file.read_text())["layout"] == "auto"
    assert load_run(file, world=None) == run


def test_it_becomes_the_first_layout_of_the_search_and_says_why() -> None:
    options = ["model.preset=1.3b", "train.global_batch=64", "data.context=8192"]
    given = load_run(None, options, builtin="cuda", world=None)
    found = search(given, 8, devices()["h100"], fixed=["micro_batch"])
    run = load_run(None, [*options, "layout=auto"], builtin="cuda", world=8, hardware="h100")
    assert run.layout.ranks() == found.best.run.layout.ranks()
    assert run.layout.zero == found.best.run.layout.zero
    assert "the fastest predicted of those that fit" in (run.layout.why_auto or "")
    assert load_run(None, options, builtin="cuda", world=8).layout.why_auto is None
    tables = tomllib.loads(dump_run(run))
    assert parse_run(tables, world=8).layout.ranks() == run.layout.ranks()


def test_what_the_run_file_sets_of_train_is_kept(tmp_path: Path) -> None:
    text = 'layout = "auto"\n[model]\npreset = "125m"\n[data]\ncontext = 1024\n'
    text += "[train]\nglobal_batch = 16\n"
    (tmp_path / "free.toml").write_text(text)
    (tmp_path / "fixed.toml").write_text(f"{text}micro_batch = 2\n")
    free, fixed = (
        load_run(tmp_path / f"{name}.toml", world=2, hardware="h100") for name in ("free", "fixed")
    )
    assert free.train.micro_batch > 2
    assert fixed.train.micro_batch == 2
    assert free.train.global_batch == fixed.train.global_batch == 16


LONG = ["model.preset=350m", "data.context=262144", "train.global_batch=1", "train.device=cuda"]
LONG += ["layout=auto", "train.micro_batch=1", "data.documents=join", "train.precision=bf16"]


def test_it_takes_what_saves_memory_unless_the_run_file_says_otherwise() -> None:
    run = load_run(None, LONG, builtin="cuda", world=1, hardware="rtx4090")
    assert 0 < run.train.chunk_tokens < 262144
    assert f"chunks of {run.train.chunk_tokens:,} tokens" in (run.layout.why_auto or "")
    auto = load_run(None, [*LONG, "train.chunk_tokens=auto"], world=1, hardware="rtx4090")
    assert auto.train.chunk_tokens == run.train.chunk_tokens
    assert not auto.train.has_auto_chunks
    rows = [*LONG, "train.chunk_tokens=auto", "train.offload_chunk_rows=true"]
    offloaded = load_run(None, rows, world=1, hardware="rtx4090").train
    assert offloaded.chunk_tokens > 0
    assert offloaded.offload_chunk_rows
    whole = load_run(None, [*LONG, "train.chunk_tokens=0"], world=1, hardware="rtx4090")
    assert whole.train.chunk_tokens == 0
    assert whole.train.offload_activations


def test_it_does_not_offload_more_than_the_machine_has_memory_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = devices()["rtx4090"]
    monkeypatch.setattr("longspan.planning.auto.this_device", lambda run, world: gpu)
    monkeypatch.setattr("longspan.planning.auto.cpu_memory", lambda: 1 << 40)
    whole = [*LONG, "train.chunk_tokens=0"]
    run = load_run(None, whole, builtin="cuda", world=1)
    assert run.train.offload_activations
    monkeypatch.setattr("longspan.planning.auto.cpu_memory", lambda: 1 << 20)
    with pytest.raises(UserError, match=r"nothing fits in 24 GiB and 0\.0 GiB of CPU memory"):
        load_run(None, whole, builtin="cuda", world=1)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["layout=fast"], "override must look like section.key=value"),
        (["layout=auto", "layout.shard=2"], "needs a table layout, but layout is"),
        (["layout=auto", "engine.name=deepspeed"], 'engine.name = "deepspeed"'),
    ],
)
def test_what_it_cannot_be_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_run(None, overrides, world=2)


def test_another_word_is_refused_with_what_it_may_be() -> None:
    with pytest.raises(UserError, match=r'expected a table \[layout\] or "auto", got "best"'):
        parse_run({"layout": "best"})


def test_an_unknown_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longspan.planning.auto.may_have_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Secret GPU 9000")
    with pytest.raises(UserError, match="Secret GPU 9000"):
        load_run(None, ["layout=auto", "train.device=auto"], world=2)


def test_a_job_resolves_it_where_it_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not on the machine that writes the script; with known GPUs it is seen whether it can be."""
    file = tmp_path / "run.toml"
    file.write_text('layout = "auto"\n[model]\npreset = "llama3-70b"\n')
    command = ["launch", "slurm", str(file), "--nodes", "1", "--gpus-per-node", "1"]
    assert main(command) == 0
    assert "layout.shard" not in capsys.readouterr().out  # the script names the run file
    assert main([*command, "--hardware", "l4"]) == 2
    assert "nothing fits in 24 GiB on 1 device" in capsys.readouterr().err


def losses(rank: int, world: int, folder: str, layout: list[str]) -> tuple[dict[str, int], Any]:
    run = load_run(None, [*TINY, *layout], world=world)
    train(run, folder, world=World(rank, world, rank))
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return run.layout.ranks(), [json.loads(line).get("loss") for line in lines]


@pytest.mark.parametrize("world", [2, 4])
def test_it_trains_as_the_same_layout_written_out(world: int, ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(losses, world, str(tmp_path / "auto"), ["layout=auto"])
    axes = found[0][0]
    assert all(each[0] == axes for each in found)
    explicit = [f"layout.{axis}={n}" for axis, n in axes.items()]
    expected = ranks.run(losses, world, str(tmp_path / "explicit"), explicit)
    assert found[0][1] == expected[0][1]
    saved = tomllib.loads((tmp_path / "auto" / "run.toml").read_text())
    assert {axis: saved["layout"][axis] for axis in axes} == axes


def open_different(rank: int, world: int) -> str:
    axes = {"replicate": 2, "shard": 1} if rank else {"replicate": 1, "shard": 2}
    layout = Layout(**axes).taken_for("a test")
    try:
        with open_mesh(layout, World(rank, world, rank), torch.device("cpu")):
            return ""
    except UserError as error:
        return str(error)


def test_ranks_that_found_different_layouts_end_with_an_error(ranks: Ranks) -> None:
    for message in ranks.run(open_different, 2):
        assert "since their devices differ" in message

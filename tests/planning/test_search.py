"""The search for a layout: against all candidates, tried one by one."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from longspan.cli import main
from longspan.config import AXES, Run
from longspan.hardware import devices
from longspan.planning import limits
from longspan.planning.memory import memory_per_rank
from longspan.planning.run_time import predict
from longspan.planning.search import ALLOWANCE, SHOWN, factorizations, search
from longspan.rules import check_rules
from longspan.runfile import load_run

GIB = 2**30
H100 = devices()["h100"]
OPTIONS = ["model.preset=1.3b", "data.context=8192", "train.global_batch=8", "train.micro_batch=1"]


def any_run(*overrides: str) -> Run:
    return load_run(None, [*OPTIONS, *overrides], builtin="cuda", world=None)


def test_factorizations_are_all_tuples_with_that_product() -> None:
    found = list(factorizations(24, 3))
    every = [x for x in itertools.product(range(1, 25), repeat=3) if math.prod(x) == 24]
    assert sorted(found) == sorted(every)


@pytest.mark.parametrize("gib", [80, 20, 12])
def test_the_first_is_the_fastest_of_all_that_the_rules_allow_and_that_fit(gib: int) -> None:
    run, device, world = any_run(), replace(H100, memory=gib * GIB), 4
    best: dict[tuple[int, ...], float] = {}
    quarter = -(-run.model.layers // 4)
    counts = (*range(quarter, run.model.layers, quarter), None)
    modes = [("none", None), ("selective", None), *(("full", count) for count in counts)]
    for ranks, zero, size, (mode, count) in itertools.product(
        factorizations(world, len(AXES)), (1, 2, 3), (1, 2, 4, 8), modes
    ):
        layout = {**dict(zip(AXES, ranks, strict=True)), "zero": zero}
        train = {
            "micro_batch": size,
            "activation_checkpointing": mode,
            "recompute_layers": count,
        }
        one = run.model_copy(
            update={
                "layout": run.layout.model_copy(update=layout),
                "train": run.train.model_copy(update=train),
            }
        )
        sections = {name: getattr(one, name) for name in type(one).model_fields}
        if check_rules(sections, world):
            continue
        needed = max(memory.on_device for memory in memory_per_rank(one, world))
        if needed + ALLOWANCE <= device.memory:
            rate = predict(one, world, device).tokens_per_s
            best[ranks] = max(rate, best.get(ranks, 0.0))
    found = search(run, world, device)
    expected = sorted(best.values(), reverse=True)[:SHOWN]
    assert [x.time.tokens_per_s for x in found.ranked] == pytest.approx(expected)
    for x in found.ranked:
        assert best[tuple(x.run.layout.resolve(world).values())] == pytest.approx(
            x.time.tokens_per_s
        )


def test_a_faster_way_that_does_not_fit_and_a_slower_one_are_explained() -> None:
    best = search(any_run(), 4, H100).best
    found = search(any_run(), 4, replace(H100, memory=int(best.needed + ALLOWANCE) - 1))
    text = str(found)
    assert "faster, but too large: " in text
    assert all(not x.fits and x.time.step_s < found.best.time.step_s for x in found.too_large)
    assert "% slower (" in text


def test_offload_is_taken_only_where_nothing_fits_without() -> None:
    run, nothing = any_run("data.context=512"), replace(H100, memory=int(ALLOWANCE))
    plain, offloaded = search(run, 4, nothing).smallest
    least = plain.needed
    assert offloaded.needed < least
    fitting = replace(H100, memory=int(least + ALLOWANCE))
    assert not search(run, 4, fitting).best.run.layout.offload
    smaller = replace(H100, memory=int(least + ALLOWANCE) - 1)
    assert search(run, 4, smaller).best.run.layout.offload


def test_where_nothing_fits_the_least_memory_is_named() -> None:
    found = search(any_run(), 2, replace(H100, memory=int(ALLOWANCE)))
    assert not found.ranked
    least = min(x.needed for x in found.smallest) / GIB
    assert f"nothing fits in 2 GiB on 2 devices: the least is {least:,.1f} GiB" in str(found)


def test_what_just_fits() -> None:
    """One more of each does not."""
    device, run = replace(H100, memory=24 * GIB), any_run()
    micro = limits.largest_micro_batch(
        run.model_copy(update={"layout": run.layout.model_copy(update={"shard": 2})}), 2, device
    )
    assert micro is not None
    assert micro.fits
    fewest = limits.fewest_devices(any_run("model.preset=7b"), device)
    assert fewest is not None
    assert not search(any_run("model.preset=7b"), fewest.time.gpus // 2, device).ranked


def test_the_command_ranks_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["plan", "-q", *OPTIONS, "--gpu", "h100", "--gpus", "2"]
    main([*options, "--search"])
    assert "tokens/s" in capsys.readouterr().out
    main([*options, "layout.shard=2"])
    out = capsys.readouterr().out
    assert "predicted time on 2 × H100 SXM5 80 GB" in out
    assert "USD at 3.00 per GPU and hour (2026-05)" in out
    assert main(["plan", "--gpu", "h1000"]) == 2
    assert "hardware 'h1000' is unknown" in capsys.readouterr().err


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_of_layouts_that_are_equally_fast_the_simplest_is_taken(processes: int) -> None:
    """As measured on eight CPU processes: DDP is the fastest of ten layouts."""
    options = ["layout=auto", "train.device=cpu"]
    assert load_run(None, options, world=processes).layout.replicate == processes


def test_layers_that_a_run_recomputes_do_not_count_for_other_modes() -> None:
    recomputed = ("train.activation_checkpointing=full", "train.recompute_layers=1")
    found = search(any_run(*recomputed), 4, H100)
    assert found.as_dict() == search(any_run(), 4, H100).as_dict()


def test_stages_are_not_searched_if_the_first_layers_are_recomputed() -> None:
    run = any_run("train.activation_checkpointing=full", "train.recompute_layers=1")
    found = search(run, 4, H100, fixed=["activation_checkpointing", "recompute_layers"])
    assert found.ranked
    assert all(x.run.layout.pipeline == 1 for x in found.ranked)
    assert all(x.run.train.recompute_layers == 1 for x in found.ranked)

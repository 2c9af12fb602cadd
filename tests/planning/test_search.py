"""The search for a layout: against all candidates, tried one by one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from longspan.cli import main
from longspan.config import AXES, Run
from longspan.hardware import Device, devices
from longspan.planning import limits
from longspan.planning.chunks import chunk_sizes
from longspan.planning.ladder import fastest_that_fits
from longspan.planning.memory import needed_by
from longspan.planning.run_time import with_precision
from longspan.planning.savings import LEAST_CHUNK, TILE_TOKENS, with_train
from longspan.planning.search import (
    ALLOWANCE,
    CLOSE,
    FEW,
    SHOWN,
    Candidate,
    candidate_of,
    factorizations,
    search,
    usable_memory,
)
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


def modes_of(run: Run) -> list[dict[str, Any]]:
    counts = (*range(1, run.model.layers), None)
    modes = [("none", None), ("selective", None), *(("full", count) for count in counts)]
    return [{"activation_checkpointing": mode, "recompute_layers": count} for mode, count in modes]


def fastest_of_all(
    run: Run,
    device: Device,
    layouts: Iterable[tuple[int, ...]],
    others: Sequence[dict[str, Any]],
) -> dict[tuple[int, ...], Candidate]:
    """By layout: of every ZeRO stage, micro-batch and mode, with each of `others`, what fits."""
    best: dict[tuple[int, ...], Candidate] = {}
    for ranks, zero, size, mode, other in itertools.product(
        layouts, (1, 2, 3), (1, 2, 4, 8), modes_of(run), others
    ):
        world = math.prod(ranks)
        layout = {**dict(zip(AXES, ranks, strict=True)), "zero": zero}
        train = {"micro_batch": size, **mode, **other}
        one = run.model_copy(
            update={
                "layout": run.layout.model_copy(update=layout),
                "train": run.train.model_copy(update=train),
            }
        )
        sections = {name: getattr(one, name) for name in type(one).model_fields}
        if (world == 1 and zero > 1) or check_rules(sections, world):
            continue
        found = candidate_of(one, world, device)
        if found.fits and (ranks not in best or found.time.step_s < best[ranks].time.step_s):
            best[ranks] = found
    return best


TILED: list[dict[str, Any]] = [{}, *({"mlp_tile_tokens": size} for size in TILE_TOKENS)]


@pytest.mark.parametrize("gib", [80, 28, 12])
def test_the_first_is_the_fastest_of_all_that_the_rules_allow_and_that_fit(gib: int) -> None:
    """If the fastest layout recomputes, it and the next may have tiles."""
    run, device, world = any_run(), replace(H100, memory=gib * GIB), 4
    best = fastest_of_all(run, device, factorizations(world, len(AXES)), [{}])
    found = search(run, world, device)
    plain = sorted(best.values(), key=lambda x: x.time.step_s)[:SHOWN]
    if plain[0].run.train.activation_checkpointing != "none":
        layouts = {tuple(x.run.layout.resolve(world).values()) for x in found.ranked[:FEW]}
        best |= fastest_of_all(run, device, layouts, TILED)
        assert any(x.run.train.mlp_tile_tokens for x in found.ranked) == (gib == 28)
    else:
        expected = [x.time.tokens_per_s for x in plain]
        assert [x.time.tokens_per_s for x in found.ranked] == pytest.approx(expected)
    for x in found.ranked:
        expected_time = best[tuple(x.run.layout.resolve(world).values())].time
        assert x.time.tokens_per_s == pytest.approx(expected_time.tokens_per_s)


LONG = ["model.preset=125m", "data.context=262144", "train.global_batch=1", "train.micro_batch=1"]
LONG += ["train.device=cuda", "train.precision=bf16", "data.documents=join"]


@pytest.mark.parametrize("gib", [60, 40, 12, 8])
def test_a_long_context_is_cut_into_chunks_where_that_is_fastest(gib: int) -> None:
    """Against all sizes of chunks, tiles and modes of one device."""
    run, device = any_run(*LONG), replace(H100, memory=gib * GIB)
    sizes = [0, *(size for size in chunk_sizes(run) if size >= LEAST_CHUNK)]
    others = [{**x, "chunk_tokens": size} for x in TILED for size in sizes]
    (best,) = fastest_of_all(run, device, [(1, 1, 1, 1, 1)], others).values()
    found = search(run, 1, device).best
    assert found.fits
    assert found.time.step_s == best.time.step_s
    assert (found.run.train.chunk_tokens > 0) == (gib < 40)


H200 = devices()["h200"]
DENSE = ["model.vocab=50304", "data.context=262144", "train.global_batch=1", "attention.kind=dense"]
DENSE += ["data.documents=join", "train.device=cuda", "train.precision=bf16"]


def test_chunks_whose_rows_need_more_than_they_save_do_not_hide_what_fits() -> None:
    run = any_run(*DENSE)
    (best,) = fastest_of_all(run, H200, [(1, 1, 1, 1, 1)], TILED).values()
    assert best.run.train.mlp_tile_tokens
    assert search(run, 1, H200).best.time.step_s == best.time.step_s
    ladder = fastest_that_fits(run, 1, H200, int(usable_memory(H200)))
    assert ladder is not None
    assert ladder.time.step_s == best.time.step_s


def test_recomputation_of_all_layers_that_needs_more_than_of_some_does_not_hide_these() -> None:
    options = ["model.preset=llama3.2-1b", "data.context=1024", "train.global_batch=16"]
    run = any_run(*options, "train.precision=bf16", "train.device=cuda")
    a10 = devices()["a10"]
    found = search(run, 1, a10, fixed=["micro_batch"]).best
    again = any_run(*options, "train.precision=bf16", "train.device=cuda", "train.micro_batch=16")
    assert search(again, 1, a10, fixed=["micro_batch"]).best.time.step_s < found.time.step_s
    assert search(run, 1, a10).best.run.train.micro_batch == 16


@pytest.mark.parametrize(("preset", "batch", "gib"), [("1.3b", 8, 22.5), ("350m", 4, 10)])
def test_a_larger_micro_batch_with_few_recomputed_layers_is_weighed_against_a_smaller_one(
    preset: str, batch: int, gib: float
) -> None:
    options = [f"model.preset={preset}", "data.context=4096", f"train.global_batch={batch}"]
    run = any_run(*options, f"train.micro_batch={batch}", "train.device=cuda")
    run, limit = with_precision(run, H100), int(gib * GIB)
    device = replace(H100, memory=limit + int(ALLOWANCE))
    (best,) = fastest_of_all(run, device, [(1, 1, 1, 1, 1)], TILED).values()
    assert best.run.train.micro_batch > 1
    assert (best.run.train.recompute_layers or 6) % 6
    assert search(run, 1, device).best.time.step_s == best.time.step_s
    ladder = fastest_that_fits(run, 1, device, limit)
    assert ladder is not None
    assert ladder.time.step_s == best.time.step_s


def test_where_all_layers_need_more_memory_than_all_but_one_these_are_recomputed() -> None:
    options = ["model.preset=125m", "data.context=8192", "train.global_batch=1"]
    run = with_precision(any_run(*options, "train.device=cuda"), H200)
    full = {"activation_checkpointing": "full"}
    some, every = (
        needed_by(with_train(run, **full, recompute_layers=count), 1) for count in (11, None)
    )
    assert some < every
    found = search(run, 1, replace(H200, memory=every - 1 + int(ALLOWANCE)))
    train = found.best.run.train
    assert (train.activation_checkpointing, train.recompute_layers) == ("full", 11)
    assert not found.best.run.layout.offload
    ladder = fastest_that_fits(run, 1, H200, every - 1)
    assert ladder is not None
    assert ladder.run.train == train


@pytest.mark.parametrize("tried", [1000, 5])
def test_a_search_that_is_cut_short_finds_what_needs_least(
    tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longspan.planning.search.MOST_TRIED", tried)
    run = any_run(*LONG, "train.global_batch=4")
    found = search(run, 4, replace(H100, memory=6 * GIB))
    assert found.ranked
    assert all(x.fits for x in found.ranked)
    steps = [x.time.step_s for x in found.ranked]
    assert steps[1:] == sorted(steps[1:])
    assert steps[0] <= CLOSE * min(steps)
    assert len(steps) > 1


def test_offload_that_a_run_asks_for_stays_within_the_memory_of_the_cpu() -> None:
    run = any_run("data.context=262144", "train.offload_activations=true", "train.global_batch=1")
    run = with_precision(run, H200)
    fixed = ["micro_batch", "offload_activations"]
    free, limited = (
        search(run, 1, H200, fixed=fixed, cpu_memory=size) for size in (None, 64 << 30)
    )
    assert free.best.run.train.offload_activations
    assert limited.best.offloaded <= 64 << 30
    assert limited.best.run.train.offload_activations


def test_what_is_offloaded_is_taken_only_where_nothing_fits_without_and_the_cpu_has_room() -> None:
    run = any_run(*LONG)
    small = replace(H100, memory=5 * GIB)
    found = search(run, 1, small)
    train = found.best.run.train
    assert train.offload_activations or train.offload_chunk_rows
    assert not found.best.run.layout.offload
    assert found.best.offloaded > 0
    assert f"{found.best.offloaded / GIB:,.1f} GiB in CPU memory per device" in str(found)
    without = search(run, 1, small, fixed=["offload_activations", "offload_chunk_rows"])
    assert not without.ranked or without.best.run.layout.offload
    kept = [x.run.train for x in without.ranked]
    assert not any(x.offload_activations or x.offload_chunk_rows for x in kept)
    short = search(any_run(*LONG, "data.context=32768"), 1, replace(H100, memory=5 * GIB))
    assert short.ranked
    assert not any(x.run.train.chunk_tokens for x in short.ranked)
    limited = search(run, 1, small, cpu_memory=found.best.offloaded - 1)
    assert not limited.ranked


def test_a_faster_way_that_does_not_fit_and_a_slower_one_are_explained() -> None:
    best = search(any_run(), 4, H100).best
    found = search(any_run(), 4, replace(H100, memory=int(best.needed + ALLOWANCE) - 1))
    text = str(found)
    assert "faster, but too large: " in text
    assert all(not x.fits and x.time.step_s < found.best.time.step_s for x in found.too_large)
    assert "% slower (" in text


def test_offload_is_taken_only_where_nothing_fits_without() -> None:
    run, nothing = any_run("data.context=512"), replace(H100, memory=int(ALLOWANCE))
    *plain, offloaded = search(run, 4, nothing).smallest
    least = min(x.needed for x in plain)
    assert offloaded.needed < least
    fitting = replace(H100, memory=int(least + ALLOWANCE))
    assert not search(run, 4, fitting).best.run.layout.offload
    smaller = replace(H100, memory=int(least + ALLOWANCE) - 1)
    assert search(run, 4, smaller).best.run.layout.offload


def test_where_nothing_fits_the_least_memory_is_named() -> None:
    found = search(any_run(), 2, replace(H100, memory=int(ALLOWANCE)))
    assert not found.ranked
    assert not found.refusal
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

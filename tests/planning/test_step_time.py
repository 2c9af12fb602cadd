"""The model of time: against sums by hand, and as a fit to runs that it has made itself."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import pytest

from longspan.cli import main
from longspan.errors import UserError
from longspan.hardware import devices
from longspan.planning.fitting import fit
from longspan.planning.measured_runs import read_measured_runs
from longspan.planning.run_memory import MemoryConstants, run_memory
from longspan.planning.step_time import SPREAD, Efficiencies, Workload, step_time

H100 = devices()["h100"]
ONE = {"layers": 8, "hidden": 1024, "heads": 16, "kv_heads": 16, "ffn": 4096, "is_gated": 1}
ONE |= {"vocab": 8192, "context": 2048, "micro_batch": 4, "accumulation": 1}
ONE |= {"data": 1, "tensor": 1, "pipeline": 1, "zero": 0}
PERFECT = Efficiencies(matmul=1, half_rows=1e-9, half_columns=1e-9, host_s=1e-12, sharpness=64)


def work_of(**more: float) -> Workload:
    return Workload(**{name: np.array([float(x)]) for name, x in {**ONE, **more}.items()})


def random_work(count: int, seed: int) -> Workload:
    rng = np.random.default_rng(seed)

    def among(*values: float) -> np.ndarray:
        return rng.choice(np.array(values, float), count)

    hidden = among(1024, 2048, 4096)
    return Workload(
        layers=among(12, 16, 24, 32),
        hidden=hidden,
        heads=hidden / 64,
        kv_heads=hidden / 64,
        ffn=4 * hidden,
        is_gated=np.ones(count),
        vocab=among(32000, 128000),
        context=among(2048, 4096),
        micro_batch=among(1, 2, 4, 8),
        accumulation=among(1, 4, 16, 64),
        data=among(1, 2, 4, 8, 16),
        tensor=among(1, 2, 4, 8, 16),
        pipeline=among(1, 2, 4, 8),
        zero=among(0, 1),
    )


def test_one_gpu_at_its_peak_takes_the_time_of_its_flops() -> None:
    """6 FLOPs per parameter and token, and attention; memory traffic and the host take no time."""
    rates = replace(PERFECT, block_traffic=1e-12, loss_traffic=1e-12)
    found = step_time(work_of(), H100, rates)
    tokens = 4 * 2048
    products = 6 * tokens * (8 * (4 * 1024**2 + 3 * 1024 * 4096) + 8192 * 1024) / 989e12
    attention = 8 * 3 * 2 * tokens * 2048 * 1024 / (989e12 * 0.4)
    assert found.kernels[0] == pytest.approx(products + attention, rel=1e-6)
    assert found.optimizer[0] == pytest.approx(
        20 * (8 * (4 * 1024**2 + 3 * 1024 * 4096) + 8192 * 1024) / 3.35e12
    )
    assert found.total[0] == pytest.approx(products + attention + found.optimizer[0], rel=1e-6)


def test_a_pipeline_of_equal_stages_has_the_bubble_of_the_formula() -> None:
    """(p − 1) / m of the time without it, if the head takes none."""
    work = work_of(vocab=1e-6, pipeline=4, accumulation=8)
    found = step_time(work, H100, PERFECT)
    assert found.bubble[0] == pytest.approx(found.kernels[0] * 3 / 8, rel=1e-6)


def test_the_last_stage_has_fewer_layers_beside_a_large_head() -> None:
    work = work_of(vocab=128_000, pipeline=2, accumulation=1000)
    found = step_time(work, H100, PERFECT)
    head = step_time(work_of(vocab=128_000), H100, PERFECT).kernels[0]
    layer = step_time(work_of(vocab=1e-6), H100, PERFECT).kernels[0] / 8
    head -= 8 * layer
    best = min(max(head + k * layer, (8 - k) * layer) for k in range(9))
    slots = found.kernels[0] + found.bubble[0]
    assert slots == pytest.approx(1001 * best, rel=1e-6)


def test_a_slow_host_hides_the_device() -> None:
    found = step_time(work_of(micro_batch=1), H100, replace(PERFECT, host_s=1.0))
    assert found.total[0] == pytest.approx(8.0, rel=0.01)
    assert found.host[0] > 0.99 * found.total[0]


def test_all_reduces_take_the_time_of_a_ring() -> None:
    """Four per layer of tensor parallelism, and one of all gradients."""
    found = step_time(work_of(tensor=4, data=2), H100, replace(PERFECT, link=1.0))
    one = 2 * 3 / 4 * 2 * 4 * 2048 * 1024 / 450e9
    assert found.tensor[0] == pytest.approx(8 * 4 * one)
    parameters = (8 * (4 * 1024**2 + 3 * 1024 * 4096) + 8192 * 1024) / 4
    assert found.reduce[0] == pytest.approx(2 / 2 * 4 * parameters / 450e9)


def test_parts_are_not_negative() -> None:
    found = step_time(random_work(500, 0), H100, Efficiencies())
    for field in fields(found):
        assert (getattr(found, field.name) >= -1e-12).all(), field.name


TRUE = Efficiencies(
    matmul=0.65, half_rows=400, half_columns=150, block_traffic=45, loss_traffic=14, link=0.6,
    network=0.2, send=0.8, reduce=0.5, host_s=2e-3, host_tensor=1.6, host_node_s=2e-3,
    host_pipeline_s=5e-3, host_pipeline_growth=0.8, host_pipeline_nodes=1.0, sharpness=6,
)  # fmt: skip


def test_a_fit_predicts_runs_that_it_has_not_seen_in_spite_of_disturbed_ones() -> None:
    rng = np.random.default_rng(1)
    seen, unseen = random_work(600, 2), random_work(600, 3)
    measured = step_time(seen, H100, TRUE).total * np.exp(0.02 * rng.standard_normal(600))
    measured[rng.random(600) < 0.2] *= 4  # as a network stalls
    found = fit(
        lambda rates: step_time(seen, H100, rates).total,
        measured,
        Efficiencies(),
        scale=0.05,
        spread=SPREAD,
    )
    errors = np.abs(step_time(unseen, H100, found).total / step_time(unseen, H100, TRUE).total - 1)
    assert np.median(errors) < 0.01
    assert np.quantile(errors, 0.95) < 0.06


def test_memory_is_the_sum_of_its_parts() -> None:
    constants = MemoryConstants(weight=6, optimizer=12, block=20, mlp=6, logits=6, base=1e9)
    layer, head, tokens = 4 * 1024**2 + 3 * 1024 * 4096, 8192 * 1024, 4 * 2048
    activations = tokens * (20 * 1024 + 6 * 4096)
    alone = 18 * (8 * layer + head) + 8 * activations + 6 * tokens * 8192 + 1e9
    assert run_memory(work_of(), constants)[0] == pytest.approx(alone)
    sharded = (6 + 12 / 4) * (8 * layer + head) + 8 * activations + 6 * tokens * 8192 + 1e9
    assert run_memory(work_of(data=4, zero=1), constants)[0] == pytest.approx(sharded)
    piped = 18 * (2 * layer + head) + 4 * 2 * activations + 1e9  # four micro-batches in flight
    found = run_memory(work_of(pipeline=4, accumulation=8), constants)[0]
    assert found == pytest.approx(piped)


def write_runs(file: Path, work: Workload, **columns: np.ndarray) -> None:
    names = {"context": "seq_len", "data": "dp", "tensor": "tp", "pipeline": "pp"}
    names |= {"accumulation": "grad_accum", "zero": "zero_stage"}
    table = {names.get(name, name): x for name, x in asdict(work).items() if name != "is_gated"}
    table |= {"gpus": work.data * work.tensor * work.pipeline, **columns}
    with file.open("w", newline="") as output:
        writer = csv.writer(output)
        writer.writerow(table)
        writer.writerows(zip(*(x.tolist() for x in table.values()), strict=True))


def test_the_command_fits_one_half_and_writes_an_error_for_each_run_of_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = random_work(400, 4)
    seconds = step_time(work, H100, TRUE).total
    tokens = work.step_tokens / seconds / (work.data * work.tensor * work.pipeline)
    memory = run_memory(work, MemoryConstants(optimizer=10, block=30)) / 1e9
    write_runs(tmp_path / "runs.csv", work, tokens_per_s_per_gpu=tokens, memory_gb=memory)
    options = ["--hardware", "h100", "--json", str(tmp_path / "errors.json")]
    options += ["--plot", str(tmp_path / "plot.svg")]
    assert main(["bench", "planner", str(tmp_path / "runs.csv"), *options]) == 0
    assert "200 runs" in capsys.readouterr().out
    found = json.loads((tmp_path / "errors.json").read_text())
    assert found["errors"]["tokens_per_s_error"]["median"] < 0.01
    assert found["errors"]["memory_error"]["median"] < 0.001
    assert [row["line"] for row in found["rows"]] == list(range(3, 403, 2))
    for row in found["rows"]:
        index = row["line"] - 2
        assert row["measured_tokens_per_s"] == pytest.approx(tokens[index], rel=1e-4)
        error = abs(row["predicted_tokens_per_s"] / row["measured_tokens_per_s"] - 1)
        assert row["tokens_per_s_error"] == pytest.approx(error, abs=1e-4)
    assert (tmp_path / "plot.svg").read_text().startswith("<svg")


def test_a_file_of_step_times_is_read_as_runs_of_a_gpt(tmp_path: Path) -> None:
    file = tmp_path / "runs.csv"
    file.write_text(
        "gpus,global_batch,micro_batch,hidden,heads,layers,seq_len,tp,dp,pp,iteration_ms\n"
        "2,16,8,1024,16,24,1024,1,1,2,372.16\n"
    )
    runs = read_measured_runs(file)
    assert (runs.work.accumulation[0], runs.work.ffn[0], runs.work.vocab[0]) == (2, 4096, 51_200)
    assert runs.seconds[0] == pytest.approx(0.37216)
    assert (runs.work.is_gated[0], runs.memory) == (0, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no runs"),
        ("gpus,tp\n1,1\n", "lacks the columns layers, hidden, .* iteration_ms or tokens_per_s"),
    ],
)
def test_a_file_without_runs_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "runs.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        read_measured_runs(tmp_path / "runs.csv")


@pytest.mark.parametrize("value", ["0", "-1", "many", "", "nan", "inf"])
def test_a_value_that_is_no_size_is_refused_with_its_line(tmp_path: Path, value: str) -> None:
    work = random_work(3, 0)
    write_runs(tmp_path / "runs.csv", work, iteration_ms=np.ones(3))
    lines = (tmp_path / "runs.csv").read_text().splitlines()
    lines[2] = ",".join([value, *lines[2].split(",")[1:]])
    (tmp_path / "runs.csv").write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"line 3: layers must be a positive number"):
        read_measured_runs(tmp_path / "runs.csv")


def test_too_few_runs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_runs(tmp_path / "runs.csv", random_work(9, 0), iteration_ms=np.ones(9))
    options = ["bench", "planner", str(tmp_path / "runs.csv"), "--hardware", "h100"]
    assert main(options) == 2
    assert "5 runs are too few to fit to: give at least 20" in capsys.readouterr().err

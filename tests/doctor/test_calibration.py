"""`longspan doctor --calibrate`: a table that the planner reads. Rates are given, not measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from longspan.cli import main
from longspan.doctor import calibration
from longspan.doctor.calibration import Measured, device_table
from longspan.hardware import device_of
from longspan.planning.network import CollectiveFit, Network
from longspan.planning.rates import rates_of

BATCH = ["train.global_batch=2", "train.micro_batch=1"]
CPU = Measured("CPU process", True, 8 << 30, {"fp32": 4e10}, 2e10)
GPU = Measured('NVIDIA "Future" 9 (x)', False, 96 << 30, {"fp32": 5e13, "bf16": 7e14}, 3e12)


@pytest.mark.parametrize(("found", "processes"), [(CPU, 1), (CPU, 4), (GPU, 8)])
def test_the_planner_gets_what_was_measured(
    tmp_path: Path, found: Measured, processes: int
) -> None:
    fit = CollectiveFit("all_reduce", processes, 1e-5, 5e9, 0.1)
    network = Network("m", "gloo", processes, {"all_reduce": fit})
    file = tmp_path / "mine.toml"
    file.write_text(device_table(found, processes, network))
    device = device_of(str(file))
    rates, share = rates_of(device), processes if found.is_cpu else 1
    for precision, rate in found.matmul.items():
        assert device.flops[precision] * rates.matmul == pytest.approx(rate / share, rel=1e-3)
    assert device.bandwidth * rates.bandwidth == pytest.approx(found.bandwidth / share, rel=1e-3)
    assert device.link * rates.link == pytest.approx(5e9, rel=1e-3)
    assert device.memory == pytest.approx(found.memory / share, rel=1e-2)
    assert device.gpus_per_node == processes


def test_what_is_not_measured_is_said() -> None:
    assert "assumed, as no result of bench collectives was given" in device_table(GPU, 8)


def test_the_command_writes_a_table_that_plan_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibration, "measure", lambda _: GPU)
    file = tmp_path / "mine.toml"
    assert main(["doctor", "--calibrate", "-o", str(file)]) == 0
    assert f"plan --gpu {file}" in capsys.readouterr().out
    assert main(["plan", "--gpu", str(file), "--gpus", "2", *BATCH]) == 0
    assert 'predicted time on 2 × NVIDIA "Future" 9 (x)' in capsys.readouterr().out
    assert main(["doctor", "--calibrate"]) == 0
    assert capsys.readouterr().out == file.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--calibrate", "-o", "mine.txt"], "must name a file that ends in .toml"),
        (["-o", "mine.toml"], "are for --calibrate: add it"),
        (["--calibrate", "--network", "missing.json"], "cannot read missing.json"),
    ],
)
def test_invalid_options_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["doctor", *arguments]) == 2
    assert message in capsys.readouterr().err

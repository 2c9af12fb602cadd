"""The table of devices: which GPU a driver's name means, and a table of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from longspan.errors import UserError
from longspan.hardware import device_of, devices, find_device, peak_bandwidth, peak_flops

NAMES = {
    "Tesla V100-SXM2-32GB": "v100",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-PCIE-40GB": "a100-40gb",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100 80GB PCIe": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "gb200",
    "NVIDIA L4": "l4",
    "NVIDIA L40S": "l40s",
    "NVIDIA A10": "a10",
    "NVIDIA GeForce RTX 3090": "rtx3090",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA GeForce RTX 5090": "rtx5090",
    "AMD Instinct MI300X": "mi300x",
}
OTHERS = ["NVIDIA L40", "NVIDIA A10G", "NVIDIA GH200 480GB", "NVIDIA H100 NVL", "NVIDIA A1000"]
OTHERS += ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3090 Ti", "CPU", ""]


def test_every_device_is_found_by_its_driver_name() -> None:
    assert {find_device(name).name for name in NAMES} == devices().keys()  # type: ignore[union-attr]
    for name, expected in NAMES.items():
        found = find_device(name)
        assert found is not None
        assert found.name == expected, name


@pytest.mark.parametrize("name", OTHERS)
def test_a_device_that_is_not_in_the_table_is_unknown(name: str) -> None:
    assert find_device(name) is None
    assert peak_flops(name) is None
    assert peak_bandwidth(name) is None


def test_rates_of_some_data_sheets() -> None:
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_bandwidth("NVIDIA H200") == 4.8e12
    assert peak_flops("Tesla V100-SXM2-32GB") == 125e12  # fp16: it has no bf16
    assert devices()["v100"].peak("bf16") is None
    assert devices()["a100"].memory == 80 * 2**30
    for device in devices().values():
        assert device.bandwidth > device.link >= device.network, device.name
        assert (device.usd_per_h is None) == (device.priced == "")


TABLE = """
[mine]
title = "Mine"
match = "Mine"
gib = 64
tflops = { bf16 = 400 }
tb_s = 2
link_gb_s = 100
net_gb_s = 50
gpus_per_node = 4
watts = 500
"""


def test_a_table_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(TABLE)
    found = device_of(str(file))
    assert (found.name, found.memory, found.peak("bf16")) == ("mine", 64 * 2**30, 400e12)
    assert device_of("h100") is devices()["h100"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("gib = 64", "", "gib: Field required"),
        ("gib = 64", "gib = -1", "gib: Input should be greater than or equal to 0.000001, got -1"),
        ("gib = 64", f"gib = 0x{'f' * 10_000}", "gib: Input should be a valid number"),
        ("gib = 64", "gib = 64\nram = 3", "ram: Extra inputs are not permitted"),
        ("bf16 = 400", "int4 = 400", "tflops.int4.*: Input should be 'fp32', 'tf32'"),
        ("bf16 = 400", 'bf16 = "fast"', "tflops.bf16: Input should be a valid number, got 'fast'"),
        ("bf16 = 400", "fp8 = 400", "tflops: .*expected the rate of bf16, fp16 or fp32"),
        ("{ bf16 = 400 }", "5", "tflops: Input should be a valid dictionary, got 5"),
        ("{ bf16 = 400 }", "{}", "tflops: .*expected the rate of bf16, fp16 or fp32"),
        ("tb_s = 2", "tb_s = 1e-320", "tb_s: Input should be greater than or equal to 0.000001"),
        ("gpus_per_node = 4", "gpus_per_node = 0.5", "gpus_per_node: .*valid integer, got 0.5"),
        ("gib = 64", f"gib = {'[' * 3000}", "is not TOML"),
        ('"Mine"\nmatch', r'"\u001b[2J"' + "\nmatch", "title: String should match"),
        ("[mine]", r'["\u001b[2J"]', "the table must have a name like h100-80gb, got"),
        ("[mine]", "[mine", "is not TOML"),
        ("watts = 500", "watts = 500\n[other]\n", "must have one table, of one GPU, got 2"),
        ("[mine]", "", "must have one table"),
    ],
)
def test_a_wrong_table_is_refused_in_words(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(TABLE.replace(old, new))
    with pytest.raises(UserError, match=message):
        device_of(str(file))


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(UserError, match=r"hardware 'h300' is unknown: expected v100, .*mi300x, or"):
        device_of("h300")
    with pytest.raises(UserError, match=r"cannot read none\.toml"):
        device_of("none.toml")

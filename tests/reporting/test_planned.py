"""The page of `longspan plan --html`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from longspan.cli import main
from longspan.hardware import devices
from longspan.planning.plan import plan
from longspan.reporting import render
from longspan.reporting.data import ResultData
from longspan.runfile import load_run
from tests.reporting.browser import needs_chromium, show

OPTIONS = [
    "model.preset=1.3b",
    "layout.pipeline=2",
    "train.micro_batch=1",
    "train.global_batch=64",
    "data.context=8192",
    "--gpu",
    "h100",
    "--gpus",
    "16",
]


def widths(page: str, name: str) -> list[float]:
    """Widths of the parts of the bar with this name, in percent."""
    (bar,) = re.findall(rf'class="name">{name}</span>(.*?)<span class="value"', page)
    return [float(x) for x in re.findall(r"width:([\d.]+)%", bar)]


@needs_chromium
def test_a_page_shows_memory_time_scaling_and_layouts(tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    assert main(["plan", *OPTIONS, "--html", str(file)]) == 0
    page = file.read_text()
    assert sum(widths(page, "one step")) == pytest.approx(100, abs=0.1)
    assert 0 < sum(widths(page, "pipeline rank 0")) < 100  # of the device
    assert widths(page, "H100 SXM5 80 GB") == [100.0]
    assert page.count('<th scope="col">tokens/s</th>') == 1
    shown = show(file, tmp_path, width=390, height=3600, dark=True)
    assert shown.errors == []
    assert shown.requests == []
    assert shown.attribute("data-drawn") != []  # the scaling curve
    assert shown.pixels("#7cb2ee") > 100  # the first part of the bars, in the dark


def test_a_page_says_what_does_not_fit(tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    assert main(["plan", *OPTIONS, "data.context=1048576", "--gpus", "2", "--html", str(file)]) == 0
    page = file.read_text()
    assert re.search(r"pipeline rank 0, 1 does not fit: [\d.,]+ of 80 GiB", page)
    assert "activation checkpointing none, chunks of 16,384 tokens" in page


def test_a_page_says_what_would_fit() -> None:
    options = [x for x in OPTIONS if "." in x and x != "layout.pipeline=2"]
    run = load_run(None, [*options, "data.context=131072", "train.precision=bf16"], world=1)
    h100 = devices()["h100"]
    content = json.loads(json.dumps(plan(run, 1, h100).as_dict()))
    changes = " ".join(content["ladder"]["together"]["settings"])
    assert changes
    page = render([ResultData(Path("plan"), "plan", {**content, "device_bytes": h100.memory})])
    assert f"the fastest that fits: {changes}</li>" in page


def test_without_a_device_the_page_shows_what_is_known(tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    assert main(["plan", *OPTIONS[:-4], "--html", str(file)]) == 0
    page = file.read_text()
    assert "pipeline rank 1" in page
    assert "Layouts that fit" not in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--html", "plan.txt"], "--html must name a file that ends in .html, got plan.txt"),
        (["--html", "plan.html", "--search"], "--html is of one layout"),
        (["--check", "--search"], "--check is of one layout"),
        (["--html", "/nowhere/plan.html"], "cannot write /nowhere/plan.html"),
    ],
)
def test_what_makes_no_page_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["plan", *OPTIONS, *arguments]) == 2
    assert message in capsys.readouterr().err

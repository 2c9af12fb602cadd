"""The docs' custom training loops, on two processes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from longspan.launching.local import run_processes
from tests.launching.test_elastic import free_port
from tests.slow import slow

EXAMPLES = Path(__file__).parents[2] / "examples"
START = """
import runpy, sys
if "deepspeed" in sys.argv[1]:
    import deepspeed
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # saves a minute of compilation
runpy.run_path(sys.argv[1])
"""


@pytest.mark.parametrize(
    "name",
    [
        "custom_loop",
        pytest.param("custom_loop_deepspeed", marks=slow("parity")),
        pytest.param("custom_loop_accelerate", marks=slow("parity")),
    ],
)
def test_a_custom_loop_learns(
    name: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))  # as torchrun would
    command = [sys.executable, "-c", START, str(EXAMPLES / f"{name}.py")]
    assert run_processes(command, 2, tmp_path / "logs") == 0
    output = capfd.readouterr().out + (tmp_path / "logs" / "rank-1.log").read_text()
    losses = re.findall(r"rank [01]: loss ([\d.]+)", output)
    assert len(losses) == 2
    assert losses[0] == losses[1]  # the same gradients on both
    assert float(losses[0]) < 2  # from 5.5, that of a uniform guess among 256 bytes


def test_the_docs_show_the_examples_as_they_are() -> None:
    page = (EXAMPLES.parent / "docs" / "engines.md").read_text()
    for path in EXAMPLES.glob("custom_loop*.py"):
        code = path.read_text().split('"""')[2].strip()
        assert code in page, path.name

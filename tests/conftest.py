"""Fixtures shared by all tests, among them a pool of real processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():  # must be set before Triton and the kernels are imported
    os.environ["TRITON_INTERPRET"] = "1"
    if find_spec("triton"):
        from tests.triton_interpreter import make_faster

        make_faster()

from tests.harness import Ranks

# nohup and background jobs ignore these, and so would every process here.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Provide processes that are reused across tests: `ranks.run(function, world, *arguments)`."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def trackio_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TRACKIO_DIR for all tests: a process that has imported trackio keeps to the first one."""
    return tmp_path_factory.mktemp("trackio")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))

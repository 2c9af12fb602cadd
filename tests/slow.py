"""The mark of tests that are too long for `make test`."""

from __future__ import annotations

import os

import pytest


def slow(target: str) -> pytest.MarkDecorator:
    """A test that `make target` runs, and `make test` skips."""
    return pytest.mark.skipif("LONGSPAN_SLOW" not in os.environ, reason=f"runs by `make {target}`")

"""Whether the data of a run can be read, and is what its index says. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from longspan.config import Run
from longspan.data import open_source
from longspan.doctor.finding import Finding
from longspan.errors import UserError


def check_data(run: Run, facts: dict[str, object], limit_s: float) -> Iterator[Finding]:
    """Open and verify the data; its fingerprint is added to the `facts` of this rank."""
    if run.model.factory:
        yield Finding("data", "ok", f"that of model.factory = {run.model.factory!r}: not opened")
        return
    try:
        source = open_source(run.data, run.model)
        facts["fingerprint"] = source.fingerprint
        remaining = 0
        verification = source.verification() if run.data.verify else None
        if verification is not None:
            with verification:
                remaining = verification.wait(limit_s)
    except UserError as error:
        yield Finding(
            "data", "error", str(error), "every machine needs the same folder under the same path"
        )
        return
    seen = source.describe()
    if remaining:
        yield Finding(
            "data",
            "warning",
            f"{seen}; {remaining / 1e9:,.1f} GB are not verified after {limit_s:g} s",
            "`longspan data info` verifies all of it, and train does at its start",
        )
    else:
        yield Finding("data", "ok", seen)

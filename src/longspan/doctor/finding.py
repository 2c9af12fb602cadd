"""What a check has found, and the report of all ranks. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from longspan.wording import counted, printable

Status = Literal["ok", "warning", "error"]
MAX_OK_ROWS = 3
COLORS: dict[Status, str] = {"ok": "green", "warning": "yellow", "error": "red"}


@dataclass(frozen=True)
class Finding:
    """What one check has seen, and what to do about it."""

    name: str
    status: Status
    seen: str
    advice: str = ""


@dataclass(frozen=True)
class Row:
    """A finding, and the ranks that have made it; without ranks it is about all of them."""

    finding: Finding
    ranks: tuple[int, ...] = ()
    where: str = ""


@dataclass(frozen=True)
class Report:
    """The findings of all ranks. Those that are the same on many ranks are one row."""

    rows: tuple[Row, ...]
    world: int = 1

    @property
    def status(self) -> Status:
        found = {row.finding.status for row in self.rows}
        return "error" if "error" in found else "warning" if "warning" in found else "ok"

    def findings(self, name: str) -> list[Finding]:
        """The findings of one check."""
        return [row.finding for row in self.rows if row.finding.name == name]

    def as_dict(self) -> dict[str, Any]:
        rows = [{**asdict(row.finding), "ranks": list(row.ranks)} for row in self.rows]
        return {"status": self.status, "world": self.world, "findings": rows}

    def as_table(self) -> Table:
        """One line per row, and below it what to do; made to fit narrow terminals."""
        table = Table(box=None, padding=(0, 1, 0, 0), show_header=False, show_edge=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold", max_width=16)
        table.add_column(overflow="fold", ratio=1)
        for row in self._shown_rows():
            found = row.finding
            text = Text(printable(f"{row.where}: {found.seen}" if row.where else found.seen))
            if found.advice:
                text.append(f"\n→ {printable(found.advice)}", style="bold")
            table.add_row(Text(found.status, style=COLORS[found.status]), found.name, text)
        return table

    def _shown_rows(self) -> Iterator[Row]:
        """All rows, but of many that are ok and differ, as in free space, only the first."""
        for name, rows in groupby(self.rows, lambda row: (row.finding.name, row.finding.status)):
            first, *others = rows
            if name[1] != "ok" or len(others) < MAX_OK_ROWS:
                yield from (first, *others)
            else:
                seen = f"{first.finding.seen}; {len(others)} others differ, all ok"
                yield replace(first, finding=replace(first.finding, seen=seen))

    def summary(self) -> str:
        counts = [
            counted(n, noun)
            for noun in ("error", "warning")
            if (n := sum(row.finding.status == noun for row in self.rows))
        ]
        where = "" if self.world == 1 else f" on {self.world} ranks"
        return f"{', '.join(counts) or 'no problem'} found{where}"


def join_findings(
    found: Mapping[int, Sequence[Finding]], hosts: Mapping[int, str], world: int
) -> Report:
    """Join the findings of each rank, in the order of the checks."""
    ranks_of: dict[Finding, list[int]] = {}
    made_by: dict[str, set[int]] = {}
    order: dict[str, int] = {}
    for rank, findings in sorted(found.items()):
        for finding in findings:
            order.setdefault(finding.name, len(order))
            made_by.setdefault(finding.name, set()).add(rank)
            ranks_of.setdefault(finding, []).append(rank)
    rows = []
    for finding, ranks in ranks_of.items():
        where = "" if set(ranks) == made_by[finding.name] else _where(ranks, hosts)
        rows.append(Row(finding, tuple(ranks), where))
    rows.sort(key=lambda row: (order[row.finding.name], row.finding.status))
    return Report(tuple(rows), world)


def _where(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    text = ranks_text(ranks)
    names = sorted({hosts[rank] for rank in ranks if rank in hosts})
    if len(set(hosts.values())) == 1 or not 0 < len(names) <= 3:
        return text
    return f"{text} on {', '.join(names)}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Return "rank 3" or "ranks 0-3, 7"."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    is_one = len(spans) == 1 and spans[0][0] == spans[0][1]
    return f"{'rank' if is_one else 'ranks'} {text}"

"""The generations of a run's processes on one machine, which the launcher tells them through files.

A generation is the set of processes that share process groups. It ends when a rank is lost: the
launcher announces the next one and starts a process for that rank, and the ranks that are left join
it with their training state in memory (`training/recovery.py`). Imports no torch.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from longspan.files import atomic_write_text
from longspan.loopback import STORE

FOLDER, NUMBER, REPLACES = (
    "LONGSPAN_GENERATIONS",
    "LONGSPAN_GENERATION",
    "LONGSPAN_REPLACES_LOST",
)
"""Set by a launcher that restarts or replaces lost ranks in the environment of its processes."""


@dataclass(frozen=True)
class Generation:
    """The processes of a run between two losses. Its files lie in the launcher's own folder."""

    folder: Path
    number: int = 0
    replaces_lost: bool = True
    """Whether another one follows a loss; otherwise all processes restart."""

    @staticmethod
    def of_environment() -> Generation | None:
        """The generation that this process was started for; None if the launcher has none."""
        if (folder := os.environ.get(FOLDER)) is None:
            return None
        return Generation(Path(folder), int(os.environ[NUMBER]), os.environ[REPLACES] == "1")

    def environment(self) -> dict[str, str]:
        """What a process of this generation finds in its environment."""
        store = self.folder / f"store-{self.number}"
        return {
            FOLDER: str(self.folder),
            NUMBER: str(self.number),
            REPLACES: str(int(self.replaces_lost)),
            STORE: str(store),
        }

    def next(self) -> Generation:
        return replace(self, number=self.number + 1)

    def announce(self, lost: list[int], time: float) -> None:
        """Say that this generation begins, because ranks were lost at a time."""
        atomic_write_text(self._announcement, json.dumps({"lost": lost, "time": time}))

    def announced(self) -> dict[str, Any] | None:
        """What was announced of this generation; None if nothing was."""
        try:
            found: dict[str, Any] = json.loads(self._announcement.read_text())
        except FileNotFoundError:
            return None
        return found

    def mark_ready(self, rank: int) -> None:
        """Say that a rank trains in this generation."""
        self._ready(rank).touch()

    def is_ready(self, ranks: int) -> bool:
        """Whether all ranks train in this generation."""
        return all(self._ready(rank).exists() for rank in range(ranks))

    @property
    def _announcement(self) -> Path:
        return self.folder / f"generation-{self.number}"

    def _ready(self, rank: int) -> Path:
        return self.folder / f"ready-{self.number}-{rank}"

"""The launcher replaces a lost rank, or stops all. The ranks here are scripts without torch."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from longspan.launching import local
from longspan.launching.spares import Spares

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from longspan.generation import Generation
from longspan.launching.local import join_launcher
from longspan.launching.spares import SPARE, wait_as_spare
join_launcher()
folder, kind = Path({folder!r}), "process"
if SPARE in os.environ:
    kind = "spare"
    wait_as_spare()
rank, generation = int(os.environ["RANK"]), Generation.of_environment()
(folder / f"{{generation.number}}-{{rank}}").write_text(kind)

def rejoin():
    global generation
    while generation.next().announced() is None:
        time.sleep(0.01)
    generation = generation.next()

def wait_for_all():
    generation.mark_ready(rank)
    while not generation.is_ready(2):
        time.sleep(0.01)
"""
LOSE_RANK_1 = """
if generation.number == 0:
    wait_for_all()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    rejoin()
"""
RAISE_ON_RANK_1 = LOSE_RANK_1.replace(
    "os.kill(os.getpid(), signal.SIGKILL)", "raise ValueError('odd')"
)


def launch(
    folder: Path,
    body: str,
    lost: list[str],
    received: list[int] | None = None,
    on_poll: Callable[[], None] = lambda: None,
    may_replace: bool = True,
) -> int:
    """Run two ranks; `lost` receives why any was lost."""
    script = folder / "rank.py"
    script.write_text(SCRIPT.format(folder=str(folder)) + body)

    def on_lost(reasons: object) -> bool:
        lost.append(str(reasons))
        return may_replace

    command = [sys.executable, str(script)]
    with Spares(command, is_wanted=lambda: True) as spares:
        return local.run_processes(
            command, 2, folder / "logs", received=received, on_poll=on_poll, quiet=True,
            spares=spares, on_lost=on_lost,
        )  # fmt: skip


def started(folder: Path) -> dict[str, str]:
    """Generation and rank of each process, and whether it was a spare."""
    return {path.name: path.read_text() for path in folder.glob("[0-9]-[0-9]")}


@pytest.mark.parametrize(
    ("body", "reason"),
    [(LOSE_RANK_1, "was killed by SIGKILL"), (RAISE_ON_RANK_1, "ValueError: odd")],
    ids=["killed", "raised"],
)
def test_a_spare_replaces_a_lost_rank_and_the_other_stays(
    tmp_path: Path, body: str, reason: str
) -> None:
    lost: list[str] = []
    assert launch(tmp_path, body + "wait_for_all()", lost) == 0
    assert len(lost) == 1
    assert lost[0].startswith("{1: ")
    assert reason in lost[0]
    assert started(tmp_path) == {"0-0": "process", "0-1": "process", "1-1": "spare"}


def test_a_rank_that_is_lost_before_all_are_back_stops_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "GRACE_S", 0.1)
    again = "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\nwait_for_all()"
    lost: list[str] = []
    assert launch(tmp_path, LOSE_RANK_1 + again, lost) == 1
    assert len(lost) == 1
    assert "rank 1 was killed by SIGKILL" in capfd.readouterr().err
    assert set(started(tmp_path)) == {"0-0", "0-1", "1-1"}


@pytest.mark.parametrize(
    "ending",
    [
        "sys.exit(1)",  # as on divergence or out of memory, which all have to follow
        "raise ValueError if rank else SystemExit(0)",  # nobody is left to go on
        "os.kill(os.getpid(), signal.SIGKILL)",
    ],
)
def test_ranks_that_all_end_are_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr(local, "GRACE_S", 0.1)
    lost: list[str] = []
    assert launch(tmp_path, "wait_for_all()\n" + ending, lost) == 1
    assert lost == []
    assert set(started(tmp_path)) == {"0-0", "0-1"}


def test_without_consent_a_lost_rank_stops_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "GRACE_S", 0.1)
    lost: list[str] = []
    assert launch(tmp_path, LOSE_RANK_1, lost, may_replace=False) == 1
    assert len(lost) == 1
    assert set(started(tmp_path)) == {"0-0", "0-1"}


STOPPED_AFTER_RECOVERY = (
    LOSE_RANK_1
    + """
while rank == 1 and not (folder / "sent").exists():
    time.sleep(0.01)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
wait_for_all()
time.sleep(30)
"""
)


def test_a_signal_during_a_recovery_arrives_after_it(tmp_path: Path) -> None:
    """Rank 0 would be killed by it: it has left its training loop."""
    received: list[int] = []

    def send() -> None:
        if "1-1" in started(tmp_path) and not received:
            os.kill(os.getpid(), signal.SIGTERM)
            (tmp_path / "sent").touch()

    assert launch(tmp_path, STOPPED_AFTER_RECOVERY, [], received, send) == 3
    assert received == [signal.SIGTERM]


def test_a_signal_just_after_a_loss_arrives_after_the_recovery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that is left could not save, and would go on without it once all are back."""
    body = "signal.signal(signal.SIGTERM, lambda *_: (folder / 'early').touch())\n"
    received: list[int] = []

    def sleep(seconds: float) -> None:
        real_sleep(seconds)
        if seconds == local.SETTLE_S and not received:
            os.kill(os.getpid(), signal.SIGTERM)
            (tmp_path / "sent").touch()

    real_sleep = time.sleep
    monkeypatch.setattr(local.time, "sleep", sleep)
    assert launch(tmp_path, body + STOPPED_AFTER_RECOVERY, [], received) == 3
    assert received == [signal.SIGTERM]
    assert not (tmp_path / "early").exists()


def test_ranks_that_restart_are_spares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "GRACE_S", 0.1)
    script = tmp_path / "rank.py"
    body = """
wait_for_all()
while not (folder / "go").exists():
    time.sleep(0.01)
sys.exit(0 if kind == "spare" else 1)
"""
    script.write_text(SCRIPT.format(folder=str(tmp_path)) + body)
    command, codes = [sys.executable, str(script)], []
    with Spares(command, is_wanted=lambda: not codes) as spares:

        def on_poll() -> None:
            if spares.waiting == 2:
                (tmp_path / "go").touch()

        for _ in range(2):
            codes.append(
                local.run_processes(
                    command, 2, tmp_path / "logs", quiet=True, on_poll=on_poll, spares=spares
                )
            )
        assert spares.waiting == 0  # none was wanted after the second start
    assert codes == [1, 0]
    assert started(tmp_path) == {"0-0": "spare", "0-1": "spare"}

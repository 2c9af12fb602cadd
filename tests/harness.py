"""Run a function on n real processes joined by gloo.

    def agree(rank: int, world: int, scale: int) -> int:
        total = torch.tensor(rank * scale)
        dist.all_reduce(total)
        return int(total)

    def test_agree(ranks: Ranks) -> None:
        assert ranks.run(agree, 4, 10) == [60, 60, 60, 60]

The function lives at the top of a test module, is called as function(rank, world, *arguments) with
a process group around it, and its results come back in order of rank. Workers are started once,
by a forkserver that has torch loaded, and are kept: a call costs milliseconds, not seconds. When a
rank raises, or the timeout passes, the test fails with every rank's traceback, those still running
included, and the workers are replaced.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TextIO

TIMEOUT_S = 600.0
"""Ends a hang, and nothing that is merely slow: two cores may be shared with others."""
MOST_THREADS = 200
"""A worker with more is replaced: gloo's threads stay where torch's caches keep a mesh, and idle
ones by the hundred, which wake now and then, slow two cores down to a crawl."""
GRACE_S = 2.0
"""How long the other ranks may go on after one has raised."""


class RanksFailed(AssertionError):
    """A rank raised or the time ran out; the message holds each rank's traceback."""


@dataclass(frozen=True)
class Answer:
    result: Any = None
    error: str | None = None
    died: bool = False
    threads: int = 0


@dataclass
class _Worker:
    process: ForkServerProcess
    pipe: Connection
    stacks: Path


def _receive(worker: _Worker) -> Answer:
    try:
        answer: Answer = worker.pipe.recv()
        return answer
    except EOFError:
        worker.process.join()
        error = f"the process ended with exit code {worker.process.exitcode}\n"
        return Answer(error=error, died=True)


class Ranks:
    """A pool of processes that grows to the largest world asked for."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "torch.distributed"])
        self._folder = tempfile.TemporaryDirectory(prefix="longspan-ranks-")
        self._workers: list[_Worker] = []
        self._calls = 0

    def run(
        self,
        function: Callable[..., Any],
        world: int,
        *arguments: Any,
        timeout: float = TIMEOUT_S,
    ) -> list[Any]:
        """function(rank, world, *arguments) on `world` processes; its results by rank."""
        while len(self._workers) < world:
            self._workers.append(self._start())
        workers = self._workers[:world]
        self._calls += 1
        store = Path(self._folder.name) / f"store-{self._calls}"
        for rank, worker in enumerate(workers):
            worker.pipe.send((function, rank, world, str(store), timeout, arguments))
        answers = self._collect(workers, timeout)
        store.unlink(missing_ok=True)
        fine = [answer for answer in answers if answer and answer.error is None]
        if len(fine) == world:
            if any(answer.threads > MOST_THREADS for answer in fine):
                self._replace_all()
            return [answer.result for answer in fine]
        report = self._report(workers, answers, timeout)
        self._replace_all()
        raise RanksFailed(f"{function.__name__} on {world} ranks failed\n{report}")

    def close(self) -> None:
        for worker in self._workers:
            worker.process.kill()
            worker.process.join()
        self._workers = []
        self._folder.cleanup()

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        stacks = Path(self._folder.name) / f"stacks-{time.monotonic_ns()}"
        process = self._context.Process(target=_serve, args=(theirs, str(stacks)), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours, stacks)

    def _collect(self, workers: list[_Worker], timeout: float) -> list[Answer | None]:
        """Each rank's answer, None where none came in time."""
        answers: list[Answer | None] = [None] * len(workers)
        waiting = {worker.pipe: rank for rank, worker in enumerate(workers)}
        deadline = time.monotonic() + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                rank = waiting.pop(pipe)  # type: ignore[call-overload]
                answer = answers[rank] = _receive(workers[rank])
                if answer.error is not None:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers

    def _report(self, workers: list[_Worker], answers: list[Answer | None], timeout: float) -> str:
        parts = []  # (order, text): a rank that raised says more than one that waited for it
        for rank, (worker, answer) in enumerate(zip(workers, answers, strict=True)):
            if answer is None:
                stack = self._stack_of(worker)
                parts.append(
                    (2, f"--- rank {rank} still running (timeout {timeout:g} s), at\n{stack}")
                )
            elif answer.error is None:
                parts.append((3, f"--- rank {rank} finished"))
            else:
                parts.append((0 if answer.died else 1, f"--- rank {rank} raised\n{answer.error}"))
        return "\n".join(text for _, text in sorted(parts))

    def _stack_of(self, worker: _Worker) -> str:
        assert worker.process.pid is not None
        os.kill(worker.process.pid, signal.SIGUSR1)
        time.sleep(0.3)
        return worker.stacks.read_text()

    def _replace_all(self) -> None:
        for worker in self._workers:
            worker.process.kill()
            worker.process.join()
        self._workers = []


def _count_threads() -> int:
    """Of this process, those of libraries too; 0 where the system does not say."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else 0


def _serve(pipe: Connection, stacks: str) -> None:
    """A worker: one call after another, each in a process group of its own."""
    import torch
    import torch.distributed as dist
    import torch.distributed.tensor.debug

    torch.set_num_threads(1)
    file: TextIO = open(stacks, "w")  # noqa: SIM115 - faulthandler writes to it at any time
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
    while True:
        try:
            function, rank, world, store, timeout, arguments = pipe.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world),
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=timeout),
            )
            torch.manual_seed(0)
            result = function(rank, world, *arguments)
            dist.barrier()
            dist.destroy_process_group()
            # It knows process groups by names, which the next call gives to others.
            torch.distributed.tensor.debug._clear_sharding_prop_cache()
            gc.collect()
            pipe.send(Answer(result, threads=_count_threads()))
        except BaseException:  # noqa: BLE001 - whatever it is, the test must see it
            pipe.send(Answer(error=traceback.format_exc()))
            signal.pause()  # its open sockets keep the others waiting, not failing in its wake

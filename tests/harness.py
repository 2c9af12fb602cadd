"""Run a function on n real processes joined by gloo.

    def agree(rank: int, world: int, scale: int) -> int:
        total = torch.tensor(rank * scale)
        dist.all_reduce(total)
        return int(total)

    def test_agree(ranks: Ranks) -> None:
        assert ranks.run(agree, 4, 10) == [60, 60, 60, 60]

The function is defined at the top level of a test module and called as function(rank, world,
*arguments) within an initialized process group; results are returned in order of rank. Workers are
forked once from a forkserver that has imported torch and longspan, and are reused: a call takes
milliseconds, not seconds. When a rank raises or the timeout expires, the test fails with the
tracebacks of all ranks, including those still running, and the workers are replaced.
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
"""Long enough that only a hang reaches it, even if two cores are shared with others."""
MAX_THREADS = 200
"""A worker with more threads is replaced. Gloo's threads live as long as torch's caches hold their
mesh, and hundreds of idle threads that wake now and then slow down two cores."""
GRACE_S = 2.0
"""How long the other ranks may continue after one has raised."""

PRELOADED = ["torch.distributed.tensor.debug", "longspan.training"]
"""Imported once by the forkserver instead of by every worker."""


class RanksFailed(AssertionError):
    """A rank raised or timed out; the message contains the traceback of each rank."""


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
    """A pool of processes that grows to the largest world size requested."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
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
        """Return the results of function(rank, world, *arguments) on `world` processes, by rank."""
        while len(self._workers) < world:
            self._workers.append(self._start())
        workers = self._workers[:world]
        self._calls += 1
        store = Path(self._folder.name) / f"store-{self._calls}"
        for rank, worker in enumerate(workers):
            worker.pipe.send((function, rank, world, str(store), timeout, arguments))
        answers = self._collect(workers, timeout)
        store.unlink(missing_ok=True)
        succeeded = [answer for answer in answers if answer and answer.error is None]
        if len(succeeded) == world:
            if any(answer.threads > MAX_THREADS for answer in succeeded):
                self._replace_all()
            return [answer.result for answer in succeeded]
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
        """Return the answer of each rank, None if it has timed out."""
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
        reports = []  # (order, text): ranks that raised come before ranks that waited for them
        for rank, (worker, answer) in enumerate(zip(workers, answers, strict=True)):
            if answer is None:
                stack = self._stack_of(worker)
                reports.append(
                    (2, f"--- rank {rank} still running (timeout {timeout:g} s), at\n{stack}")
                )
            elif answer.error is None:
                reports.append((3, f"--- rank {rank} finished"))
            else:
                reports.append((0 if answer.died else 1, f"--- rank {rank} raised\n{answer.error}"))
        return "\n".join(text for _, text in sorted(reports))

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
    """Count the threads of this process, including those of libraries; 0 if unknown."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else 0


def _serve(pipe: Connection, stacks: str) -> None:
    """Serve calls one after another, each in a new process group."""
    import torch
    import torch.distributed as dist
    import torch.distributed.tensor.debug

    gc.freeze()  # what is imported stays: collecting it after every call would take longer
    torch.set_num_threads(1)
    file: TextIO = open(stacks, "w")  # noqa: SIM115 - faulthandler may write to it at any time
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
            dist.barrier()  # one that destroys its group would cut off those that still connect
            torch.manual_seed(0)
            result = function(rank, world, *arguments)
            dist.barrier()
            dist.destroy_process_group()
            # The cache refers to process groups by name, and the next call reuses the names.
            torch.distributed.tensor.debug._clear_sharding_prop_cache()
            gc.collect()
            pipe.send(Answer(result, threads=_count_threads()))
        except BaseException:  # noqa: BLE001 - the test must see every failure
            pipe.send(Answer(error=traceback.format_exc()))
            signal.pause()  # with open sockets, so that the other ranks do not fail, too

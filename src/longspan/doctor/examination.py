"""The examination: all ranks meet, each runs its checks, and rank 0 joins what they have found."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from longspan.benchmarks.collectives import call_of, seconds_per_call
from longspan.config import Run
from longspan.device import check_fp8, choose_device, resolve
from longspan.doctor.data import check_data
from longspan.doctor.devices import (
    check_gpu,
    describe_device,
    device_name,
    judge_rates,
    measured_rates,
)
from longspan.doctor.disk import check_disk
from longspan.doctor.finding import Finding, Report, join_findings, ranks_text
from longspan.doctor.machine import check_limits, check_shared_memory
from longspan.doctor.meeting import Meeting, judge_clocks, missing_ranks, open_store
from longspan.doctor.memory import check_memory
from longspan.doctor.network import check_rendezvous, gloo_address, judge_addresses
from longspan.doctor.software import check_software, versions
from longspan.doctor.step import check_step
from longspan.doctor.variables import check_interfaces, check_variables
from longspan.errors import UserError
from longspan.parallel.mesh import choose_backend
from longspan.parallel.world import World
from longspan.planning.network import BUS_FACTORS

Facts = dict[str, Any]
"""What a rank knows of itself, which rank 0 compares."""
Everyone = dict[int, tuple[list[Finding], Facts]]
"""What the ranks have found, and their facts."""


ALL_REDUCED = {"cpu": 4 << 20, "cuda": 256 << 20}
"""Bytes of the all-reduce that is measured."""
UNCONNECTED = (
    "let the machines reach each other on all ports above 1023 (firewall, NetworkPolicy), by the "
    "interface in NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME; NCCL_DEBUG=INFO says what NCCL tries"
)
PATIENCE = 4
"""Time limits of a check that rank 0 waits for the others: checks may be slow on one rank alone."""


@dataclass
class Examination:
    """One rank's part of an examination."""

    run: Run
    run_dir: Path
    world: World
    timeout_s: float
    show: Callable[[str], None]
    """Tells the user what is being checked."""
    device: torch.device
    facts: Facts = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    has_hung: bool = False
    """Whether a check still runs in a thread that cannot be ended."""

    def check(
        self,
        name: str,
        check: Callable[[], Iterable[Finding]],
        limit_s: float | None = None,
        advice: str = "",
    ) -> None:
        """Run one check within a time limit; what it raises is a finding, with `advice`."""
        self.show(name)
        limit_s = limit_s or self.timeout_s
        found: list[Finding] = []
        thread = threading.Thread(target=lambda: _collect(name, check, found, advice), daemon=True)
        thread.start()
        thread.join(limit_s)
        self.findings += found
        if thread.is_alive():
            self.has_hung = True
            advice = advice or "a disk, driver or network hangs; --timeout waits longer"
            seen = f"no answer within {limit_s:g} s"
            self.findings.append(Finding(name, "error", seen, advice))


def _collect(
    name: str, check: Callable[[], Iterable[Finding]], found: list[Finding], advice: str = ""
) -> None:
    try:
        found.extend(check())
    except Exception as error:  # noqa: BLE001  a check that fails is a finding; the others go on
        words = re.sub(r"\[/\S+\] ?", "", str(error)).strip() or type(error).__name__
        found.append(Finding(name, "error", f"the check failed: {words}", advice))


def examine(
    run: Run,
    run_dir: Path,
    world: World,
    *,
    timeout_s: float = 60.0,
    step: bool = True,
    show: Callable[[str], None] = lambda text: None,
) -> tuple[Report | None, bool]:
    """Examine this rank together with all others of `world`.

    Returns the report on rank 0, and on a rank that does not reach it; None on the others. And
    whether a check hangs, so that the process must be ended by `os._exit`.
    """
    exam = Examination(run, run_dir, world, timeout_s, show, torch.device("cpu"))
    exam.check("MASTER_ADDR", lambda: check_rendezvous(world, os.environ))
    meeting = _meet(exam)
    _check_rank(exam)
    try:
        everyone = _check_together(exam, meeting, step=step)
    except (RuntimeError, TimeoutError) as error:  # of torch's stores
        text = str(error).splitlines()[0]
        exam.findings.append(Finding("ranks", "error", f"the ranks have lost each other: {text}"))
        everyone, meeting.present = {world.rank: (exam.findings, exam.facts)}, [world.rank]
    report = _report(everyone, meeting, world) if meeting.is_led else None
    return report, exam.has_hung


def _check_together(exam: Examination, meeting: Meeting, *, step: bool) -> Everyone:
    """The checks that need all ranks; what all have found, on rank 0."""
    world, limit_s = exam.world, (PATIENCE + 1) * exam.timeout_s
    is_whole = len(meeting.present) == world.size
    if len(meeting.present) > 1:
        exam.check("clocks", lambda: _measure_clocks(exam, meeting))
    exam.facts |= {"host": socket.gethostname(), "hung": exam.has_hung}
    everyone = _gather(exam, meeting, "local")
    is_whole = is_whole and (not meeting.is_led or len(everyone) == world.size)
    can_start = meeting.share("can start", is_whole and _all_can(everyone), limit_s)
    if world.size > 1 and can_start:
        exam.check("all-reduce", lambda: _check_all_reduce(exam, meeting), advice=UNCONNECTED)
        can_start = meeting.share("can step", not exam.has_hung, 2 * exam.timeout_s)
    if step and not can_start:
        text = (
            "not tried, because of the errors above" if is_whole else "not tried without all ranks"
        )
        exam.findings.append(Finding("one step", "warning", text))
    elif step:
        exam.show("one step")
        hosts = {rank: facts["host"] for rank, (_, facts) in everyone.items()}
        _collect(
            "one step",
            lambda: check_step(exam.run, exam.run_dir, meeting, hosts, 10 * exam.timeout_s),
            exam.findings,
        )
    return _gather(exam, meeting, "all")


def _meet(exam: Examination) -> Meeting:
    """Meet the other ranks; a meeting of this rank alone if that fails."""
    world, opened = exam.world, list[Meeting]()

    def meet() -> Iterator[Finding]:
        try:
            meeting = Meeting(open_store(world, exam.timeout_s), world, exam.timeout_s)
            missing = meeting.check_in()
        except (RuntimeError, TimeoutError, KeyError, OSError) as error:
            where = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
            yield Finding(
                "ranks",
                "error",
                f"no rendezvous at {where}: {str(error).splitlines()[0]}",
                "start rank 0; let every machine reach that address and port, and for gloo and "
                "NCCL the others above 1023 (firewall, NetworkPolicy)",
            )
            return
        opened.append(meeting)
        if missing and world.rank == 0:
            yield missing_ranks(missing, meeting.timeout_s)
        elif world.rank == 0 and world.size > 1:
            yield Finding("ranks", "ok", f"all {world.size} ranks are here")

    exam.check("ranks", meet, 4 * exam.timeout_s)
    if opened:
        return opened[0]
    alone = Meeting(dist.HashStore(), world, exam.timeout_s)  # type: ignore[attr-defined]
    alone.present = [world.rank]
    return alone


def _check_rank(exam: Examination) -> None:
    """The checks of one rank; those of a machine only on its first rank."""
    run, world, facts = exam.run, exam.world, exam.facts
    here, resolved = int(os.environ.get("LOCAL_WORLD_SIZE", world.size)), list[Run]()

    def software() -> Iterator[Finding]:
        facts["versions"] = versions()
        yield from check_software(facts["versions"])

    def interfaces() -> Iterator[Finding]:
        yield from check_interfaces(os.environ)
        facts["gloo"] = gloo_address(os.environ)

    def device() -> Iterator[Finding]:
        try:
            exam.device = choose_device(run, world.local_rank)
            check_fp8(run.train, exam.device)
            resolved.append(resolve(run, exam.device))
            backend = choose_backend(run.layout, world.size, exam.device)
        except UserError as error:
            yield Finding("device", "error", str(error))
            return
        yield from describe_device(exam.device)
        if world.size > 1:
            yield Finding("backend", "ok", backend)

    def rates() -> Iterator[Finding]:
        facts["device"] = device_name(exam.device)
        facts["rates"] = measured_rates(exam.device)
        yield from ()

    exam.check("versions", software)
    exam.check("NCCL variables", lambda: check_variables(os.environ))
    exam.check("interfaces", interfaces)
    exam.check("device", device)
    exam.check("matrix product", rates)
    exam.check("GPU health", lambda: check_gpu(exam.device))
    if world.local_rank == 0:
        on_gpu = exam.device.type == "cuda"
        if resolved:
            exam.check("memory", lambda: check_memory(resolved[0], world.size, here))
        exam.check("shared memory", lambda: check_shared_memory(here, on_gpu=on_gpu))
        exam.check("open files", lambda: check_limits(world.size))
        exam.check("disk space", lambda: check_disk(run, exam.run_dir))
    if world.local_rank == 0 or not run.data.verify:
        exam.check("data", lambda: check_data(run, facts, exam.timeout_s / 2))


def _measure_clocks(exam: Examination, meeting: Meeting) -> Iterator[Finding]:
    exam.facts["clock"] = meeting.measure_clocks()
    yield from ()


def _check_all_reduce(exam: Examination, meeting: Meeting) -> Iterator[Finding]:
    """Join a process group as the run will, and measure an all-reduce over all ranks."""
    device, world = exam.device, exam.world
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread
    store = dist.PrefixStore("group", meeting.store)  # type: ignore[attr-defined]
    backend = choose_backend(exam.run.layout, world.size, device)
    # Longer than the limit of a check, so that NCCL's watchdog does not end this process.
    timeout = timedelta(seconds=4 * exam.timeout_s)
    if backend == "mpi":
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(
            backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout
        )
    elements = ALL_REDUCED[device.type] // 4 // world.size * world.size
    call = call_of("all_reduce", elements, device)
    call()
    rate = BUS_FACTORS["all_reduce"](world.size) * 4 * elements / seconds_per_call(call, device)
    dist.barrier()
    dist.destroy_process_group()
    if world.rank == 0:
        yield Finding("all-reduce", "ok", f"{rate / 1e9:,.2f} GB/s bus bandwidth")


def _gather(exam: Examination, meeting: Meeting, key: str) -> Everyone:
    """The findings and facts of the ranks that are here, on rank 0; nothing on the others."""
    value = [[asdict(finding) for finding in exam.findings], exam.facts]
    found = meeting.gather(key, value, limit_s=PATIENCE * exam.timeout_s)
    return {
        rank: ([Finding(**finding) for finding in findings], facts)
        for rank, (findings, facts) in found.items()
    }


NEEDED = ("device", "memory", "data", "disk writes")
"""Checks without which no step can be tried."""


def _all_can(everyone: Everyone) -> bool:
    """Whether every rank could start, and no check hangs."""
    return not any(
        facts["hung"] or any(f.name in NEEDED and f.status == "error" for f in findings)
        for findings, facts in everyone.values()
    )


def _report(everyone: Everyone, meeting: Meeting, world: World) -> Report:
    found = {rank: list(findings) for rank, (findings, _) in everyone.items()}
    facts = {rank: facts for rank, (_, facts) in everyone.items()}
    judged = list(judge_facts(facts))
    if silent := sorted(set(meeting.present) - set(found)):
        text = f"{ranks_text(silent)} did not report"
        judged.insert(0, Finding("ranks", "error", text, "look at what they have printed"))
    found[min(found)][:0] = judged
    hosts = {rank: known.get("host", "") for rank, known in facts.items()}
    return join_findings(found, hosts, world.size)


def judge_facts(facts: Mapping[int, Facts]) -> Iterator[Finding]:
    """Compare what the ranks know of themselves."""

    def of(key: str) -> dict[int, Any]:
        return {rank: known[key] for rank, known in facts.items() if key in known}

    yield from judge_versions(of("versions"))
    yield from judge_fingerprints(of("fingerprint"))
    yield from judge_addresses(of("gloo"), of("host"))
    yield from judge_clocks(of("clock"))
    yield from judge_rates(of("rates"), of("device"))


def judge_versions(versions: Mapping[int, Mapping[str, str]]) -> Iterator[Finding]:
    """Whether all ranks have the same versions."""
    if not versions:
        return
    first = next(iter(versions.values()))
    same = {name: version for name, version in first.items() if version != "none"}
    for name in first:
        ranks_of: dict[str, list[int]] = {}
        for rank, found in versions.items():
            ranks_of.setdefault(found.get(name, "none"), []).append(rank)
        if len(ranks_of) > 1:
            same.pop(name, None)
            parts = [f"{version} on {ranks_text(ranks)}" for version, ranks in ranks_of.items()]
            advice = "install the same on every machine: one image or one environment for all"
            yield Finding("versions", "error", f"{name} differs: {', '.join(parts)}", advice)
    yield Finding("versions", "ok", ", ".join(f"{name} {v}" for name, v in same.items()))


def judge_fingerprints(fingerprints: Mapping[int, str]) -> Iterator[Finding]:
    """Whether all ranks have opened the same data."""
    ranks_of: dict[str, list[int]] = {}
    for rank, fingerprint in fingerprints.items():
        ranks_of.setdefault(fingerprint, []).append(rank)
    if len(ranks_of) > 1:
        parts = [f"{value[:12]} on {ranks_text(ranks)}" for value, ranks in ranks_of.items()]
        advice = (
            "copy one folder to all machines, or use a shared one; with the built-in data, the "
        )
        advice += "same version of Python"
        yield Finding("data", "error", f"the fingerprint differs: {', '.join(parts)}", advice)

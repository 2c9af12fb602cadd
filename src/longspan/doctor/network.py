"""Where the ranks meet: the address and the port of rank 0. Imports no torch."""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from longspan.doctor.finding import Finding, ranks_text
from longspan.loopback import STORE
from longspan.parallel.launchers import FIRST_PORT, PORTS
from longspan.parallel.world import World

PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Set by torchrun to "True" if its agent already listens at MASTER_PORT."""


def check_rendezvous(world: World, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Whether MASTER_ADDR and MASTER_PORT are such that rank 0 can be reached there."""
    if world.size == 1:
        return
    if STORE in environment:
        yield Finding("MASTER_ADDR", "ok", "not needed: the ranks of one machine meet in a file")
        return
    host, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    if not host or not re.fullmatch(r"\d{1,5}", port) or not 0 < int(port) < 65536:
        yield Finding(
            "MASTER_ADDR",
            "error",
            f"MASTER_ADDR is {host!r} and MASTER_PORT {port!r}",
            "set them on every rank to the host of rank 0 and a free port there, or use torchrun",
        )
        return
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        yield Finding(
            "MASTER_ADDR",
            "error",
            f"{host} has no address here: {error.strerror}",
            "set MASTER_ADDR to a name that every machine resolves, or to an address of rank 0",
        )
        return
    addresses = sorted({str(entry[4][0]) for entry in found})
    text = host if addresses == [host] else f"{host} ({', '.join(addresses)})"
    if world.rank == 0 and not any(map(_is_local, addresses)):
        yield Finding(
            "MASTER_ADDR",
            "warning",
            f"{text} is no address of rank 0's machine, {socket.gethostname()}",
            "set MASTER_ADDR to an address of that machine, unless a service forwards it there",
        )
    elif all(address.startswith("127.") for address in addresses) and (
        environment.get("LOCAL_WORLD_SIZE", str(world.size)) != str(world.size)
    ):
        yield Finding(
            "MASTER_ADDR",
            "warning",
            f"{text} is each machine itself, but there are several",
            "set MASTER_ADDR to an address of rank 0's machine that the others reach",
        )
    else:
        yield Finding("MASTER_ADDR", "ok", text)
    if world.rank == 0:
        yield from _check_port(int(port), environment.get(AGENT_STORE) == "True")


def _check_port(port: int, is_served: bool) -> Iterator[Finding]:
    if is_served:
        yield Finding("MASTER_PORT", "ok", f"{port}, where torchrun's agent listens")
        return
    choose = f"set MASTER_PORT to a free one, such as {free_port()}"
    try:
        with socket.create_server(("", port)):
            pass
    except OSError as error:
        is_busy = error.errno == errno.EADDRINUSE
        why = "another process listens there" if is_busy else error.strerror
        yield Finding("MASTER_PORT", "error", f"port {port} cannot be used: {why}", choose)
        return
    first, last = _ephemeral_ports()
    if first <= port <= last:
        yield Finding(
            "MASTER_PORT",
            "warning",
            f"port {port} is free, but among those ({first}-{last}) that Linux gives to clients, "
            "so that another program may have it when the run starts",
            choose,
        )
    else:
        yield Finding("MASTER_PORT", "ok", f"port {port} is free")


def gloo_address(environment: Mapping[str, str]) -> str:
    """The address at which gloo will listen: that of the machine's name, unless it is told."""
    if "GLOO_SOCKET_IFNAME" in environment:
        return "as GLOO_SOCKET_IFNAME says"
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"  # gloo's choice, too


def judge_addresses(addresses: Mapping[int, str], hosts: Mapping[int, str]) -> Iterator[Finding]:
    """Whether ranks on several machines give the others an address of their own machine."""
    wrong = [rank for rank, address in addresses.items() if address.startswith("127.")]
    if wrong and len(set(hosts.values())) > 1:
        rank = wrong[0]
        yield Finding(
            "interfaces",
            "error",
            f"gloo listens at the address of the machine's name, and {hosts[rank]} is "
            f"{addresses[rank]} on {ranks_text(wrong)}: other machines cannot connect",
            "set GLOO_SOCKET_IFNAME to the interface that machines share, or correct /etc/hosts",
        )


def free_port() -> int:
    """A port that is free now, below those that Linux gives to clients."""
    start = FIRST_PORT + os.getpid() % PORTS
    for port in range(start, start + 100):
        try:
            with socket.create_server(("", port)):
                return port
        except OSError:
            continue
    return start


def _ephemeral_ports() -> tuple[int, int]:
    try:
        first, last = PORT_RANGE.read_text().split()
        return int(first), int(last)
    except (OSError, ValueError):
        return 32768, 60999


def _is_local(address: str) -> bool:
    """Whether this machine has an address: only then can a socket be bound to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True

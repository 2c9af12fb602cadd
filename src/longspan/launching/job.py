"""A training job as the generators of `longspan launch` see it, and its torchrun command.

A job is validated once, here, so that no generator meets a name that its scheduler would refuse.
The command is a list of arguments; each generator quotes it, by `shell_lines` or a serializer.
Imports no torch.
"""

from __future__ import annotations

import os
import re
import shlex
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from longspan.errors import UserError
from longspan.wording import counted, toml_value

MAX_NAME = 40
"""Characters of a name: Kubernetes appends its own to make the names of pods, of at most 63."""
MAX_TEXT = 4096
"""Characters of any other text: the longest path of Linux."""
MAX_PART = 255
"""Bytes of the name of a file or folder."""
MAX_NODES = MAX_PER_NODE = 100_000
SAVE_S = 300
"""Seconds that the workers have, after SIGTERM, to finish a step and save."""

TIMEOUTS = "join_timeout=1800,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
"""Torchrun gives up a node that does not respond after seconds, instead of most of a minute, and
waits for half an hour until all are there.
"""

ENVIRONMENT = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": (
        "1",
        "so that restarted workers do not read their predecessors' addresses",
    ),
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": (
        str(SAVE_S),
        "seconds that workers have to save after SIGTERM, before torchrun kills them",
    ),
}
"""Variables that torchrun needs: the value, and why."""

SUFFIXES = (".toml", ".yaml", ".yml")
NAME = re.compile(rf"[a-z]([a-z0-9-]{{0,{MAX_NAME - 2}}}[a-z0-9])?")
LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
WORD = re.compile(r"\w[\w.,@+-]{0,254}", re.ASCII)
IMAGE = re.compile(r"[a-z0-9][a-zA-Z0-9._/:@-]{0,254}")


@dataclass(frozen=True)
class Job:
    """What to run, and on what."""

    name: str
    run_file: str
    """Path of the run file; a generator that carries the file itself gives it another."""
    run_dir: str
    """The run folder, the same on every node."""
    overrides: tuple[str, ...] = ()
    run_text: str = ""
    """Contents of the run file."""
    nodes: int = 1
    """Nodes that train."""
    max_nodes: int = 1
    """Nodes to start; those beyond `nodes` are hot spares, unless the job is elastic."""
    is_elastic: bool = False
    """Whether the layout fits any number of nodes from `nodes` to `max_nodes`: all train."""
    gpus_per_node: int = 0
    """0 trains on CPUs, with `processes_per_node`."""
    processes_per_node: int = 1
    """One for each GPU, if there are any."""
    cpus_per_node: int | None = None
    """CPUs of a node that the job gets; None: all."""
    restarts: int = 10
    """How often torchrun restarts the workers after one has failed."""
    minutes: int | None = None
    """Time limit."""
    image: str = ""
    """Container image."""
    source: str = ""
    """Folder of longspan's source, from which it is installed or its image is built."""
    kind: Literal["job", "jobset", "trainjob"] = "job"
    """The Kubernetes object."""
    namespace: str = ""
    volume: str = "longspan"
    """A PersistentVolumeClaim that all pods can mount and write."""
    partition: str = ""
    account: str = ""
    hardware: str = ""
    """A name in `hardware.devices()`."""

    def __post_init__(self) -> None:
        problems = [*self._bad_texts(), *self._bad_numbers()]
        if problems:
            raise UserError("; ".join(problems))

    @property
    def run_name(self) -> str:
        """A plain name for a copy of the run file."""
        return f"run{next(suffix for suffix in SUFFIXES if self.run_file.endswith(suffix))}"

    @property
    def is_multi_node(self) -> bool:
        return self.max_nodes > 1

    @property
    def spares(self) -> int:
        """Number of nodes that wait until one is lost."""
        return 0 if self.is_elastic else self.max_nodes - self.nodes

    @property
    def nnodes(self) -> str:
        """Nodes that train, as torchrun takes them; it keeps more than those waiting as spares."""
        return f"{self.nodes}:{self.max_nodes}" if self.is_elastic else str(self.nodes)

    @property
    def world(self) -> int:
        """Number of ranks, the least of them if the job is elastic."""
        return self.nodes * self.processes_per_node

    def _bad_texts(self) -> list[str]:
        texts = {"run file": self.run_file, "run folder": self.run_dir}
        texts |= {"source folder": self.source} if self.source else {}
        texts |= {f"override {n}": text for n, text in enumerate(self.overrides, 1)}
        found = [f"the {what} {why}" for what, text in texts.items() if (why := _unsafe(text))]
        longest = max(len(os.fsencode(part)) for part in self.run_dir.split("/"))
        if longest > MAX_PART:
            found.append(
                f"a name in the run folder has {longest:,} bytes, and the most is {MAX_PART}"
            )
        if not self.run_file.endswith(SUFFIXES):
            found.append(
                f"the run file must end in .toml, .yaml or .yml, got {shown(self.run_file)}"
            )
        if "=" in self.run_file:
            found.append(f"the run file must not have = in its path, got {shown(self.run_file)}")
        for text in self.overrides:
            if "=" not in text or text.startswith("-"):
                found.append(f"an override must look like section.key=value, got {shown(text)}")
        words: list[tuple[str, str, re.Pattern[str], str]] = [
            ("partition", self.partition, WORD, "a name of Slurm"),
            ("account", self.account, WORD, "a name of Slurm"),
            ("image", self.image, IMAGE, "the name of a container image"),
            ("namespace", self.namespace, LABEL, "a DNS label"),
            ("volume", self.volume, LABEL, "the name of a PersistentVolumeClaim"),
        ]
        for what, text, pattern, kind in words:
            if text and not pattern.fullmatch(text):
                found.append(f"the {what} must be {kind}, got {shown(text)}")
        if not NAME.fullmatch(self.name):
            found.append(
                f"the name must be at most {MAX_NAME} lower-case letters, digits and hyphens that "
                f"begin with a letter, got {shown(self.name)}: give another with --name"
            )
        return found

    def _bad_numbers(self) -> list[str]:
        found = []
        if not 1 <= self.nodes <= self.max_nodes <= MAX_NODES:
            found.append(f"--nodes must be N or N:MAX, from 1, got {self.nodes}:{self.max_nodes}")
        if not 0 <= self.gpus_per_node <= MAX_PER_NODE:
            found.append(f"--gpus-per-node must be at least 0, got {self.gpus_per_node}")
        if not 1 <= self.processes_per_node <= MAX_PER_NODE:
            found.append(f"--processes-per-node must be at least 1, got {self.processes_per_node}")
        elif self.gpus_per_node and self.processes_per_node != self.gpus_per_node:
            found.append(
                f"one process uses one GPU, but there are {self.processes_per_node} processes and "
                f"{self.gpus_per_node} GPUs per node: leave out --processes-per-node"
            )
        if self.cpus_per_node is not None and not 1 <= self.cpus_per_node <= MAX_PER_NODE:
            found.append(f"--cpus-per-node must be at least 1, got {self.cpus_per_node}")
        if self.restarts < 0:
            found.append(f"--restarts must be at least 0, got {self.restarts}")
        if self.minutes is not None and not 1 <= self.minutes <= 10**6:
            found.append(f"--time must be from a minute to 10⁶ minutes, got {self.minutes} minutes")
        return found


def shown(text: str) -> str:
    """A text of the user in a message: quoted, without control characters, shortened."""
    return toml_value("".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text))


def _unsafe(text: str) -> str:
    """Say why a text cannot stand in a script that people read, or return nothing.

    Quotes, spaces and the like can. What is not printable cannot: a reviewer would not see it.
    """
    if not text:
        return "is empty"
    if len(text) > MAX_TEXT:
        return f"has {len(text):,} characters, more than {MAX_TEXT:,}"
    hidden = next((character for character in text if not character.isprintable()), None)
    if hidden is not None:
        return f"must not have U+{ord(hidden):04X}, which is not printable, got {shown(text)}"
    return ""


@dataclass(frozen=True)
class Target:
    """Where a job can be launched."""

    name: str
    summary: str
    text: Callable[[Job], str]
    """Write the job as a file that people can read."""
    submit: Callable[[Job, str], list[str]]
    """Return the command that submits a file, given its path; "-" is stdin."""
    options: tuple[str, ...] = ()
    """The fields of `Job` that are options of this target, and not of all."""
    file: str = "job.sh"
    """A name of the file for examples."""
    root: str = ""
    """Where containers mount the volume that they share; run folders are in it."""
    reads_stdin: bool = True
    starts_all_nodes: bool = True
    """Whether the command that submits starts all nodes; otherwise each runs the file."""


def parse_nodes(text: str) -> tuple[int, int]:
    """Return nodes that train, and nodes to start: "4" is (4, 4), "4:5" has a hot spare."""
    if not re.fullmatch(r"\d{1,6}(:\d{1,6})?", text, re.ASCII):
        raise UserError(f"--nodes must be N, or N:MAX with hot spares, got {shown(text)}")
    nodes, _, most = text.partition(":")
    return int(nodes), int(most or nodes)


def parse_minutes(text: str) -> int:
    """Return the minutes of a time limit as Slurm writes it: 90, 24:00:00 or 2-12:00:00."""
    found = re.fullmatch(r"(?:(\d{1,4})-)?(\d{1,7})(?::(\d\d))?(?::(\d\d))?", text, re.ASCII)
    if not found or (found[1] and not found[3]) or (found[3] and not found[4] and not found[1]):
        raise UserError(
            f"--time must be minutes, HOURS:MM:SS or DAYS-HH:MM:SS, got {shown(text)}; for example "
            "24:00:00"
        )
    if not found[3]:
        return int(found[2])
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return (days * 24 + hours) * 60 + minutes + (seconds > 0)


def port_of(name: str) -> int:
    """A port for the rendezvous of a job: no fixed one, so that two jobs rarely meet at one host.

    It is below the ports that Linux gives to clients.
    """
    return 20_000 + zlib.crc32(name.encode()) % 12_000


class Shell(str):
    """Text that the shell expands, such as "$host": it is quoted already."""


def torchrun(job: Job, endpoint: str = "", *, run_file: str = "") -> list[list[str]]:
    """Return the command of one node, in groups of arguments that stand on one line.

    `endpoint`: host and port of the rendezvous, if there are several nodes. `run_file`: its path on
    the node, if it is another.
    """
    start = [["torchrun", *agent(job)]]
    if job.is_multi_node:
        start += [["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", job.name]]
        start += [["--rdzv-conf", TIMEOUTS]]
    else:
        start += [["--standalone"]]  # a rendezvous on a free port
    return [*start, *training(job, run_file)]


def nodes_in_words(job: Job) -> str:
    """The number of nodes that train."""
    return f"{job.nodes} to {job.max_nodes} nodes" if job.is_elastic else counted(job.nodes, "node")


def agent(job: Job) -> list[str]:
    """The arguments of torchrun on each node, without those of the rendezvous."""
    size = ["--nnodes", job.nnodes, "--nproc-per-node", str(job.processes_per_node)]
    return [*size, "--max-restarts", str(job.restarts)]


def training(job: Job, run_file: str = "") -> list[list[str]]:
    """What torchrun runs, in groups: it starts the run, and resumes it."""
    train = [["-m", "longspan", "train", as_path(run_file or job.run_file)]]
    train += [[override] for override in job.overrides]
    return [*train, ["--resume", as_path(job.run_dir)]]


def as_path(text: str) -> str:
    """A path that no program takes for an option."""
    return f"./{text}" if text.startswith("-") else text


def shell_lines(groups: Sequence[Sequence[str]], indent: str = "  ") -> str:
    """Return a command as shell text, every argument quoted, each group on a line of its own."""
    lines = [" ".join(map(_quote, group)) for group in groups]
    return f" \\\n{indent}".join(lines)


def _quote(word: str) -> str:
    return word if isinstance(word, Shell) else shlex.quote(word)


def shell_environment() -> str:
    """The variables of a job as shell text, with the reason above each."""
    return "\n".join(
        f"# {why}\nexport {name}={value}" for name, (value, why) in ENVIRONMENT.items()
    )

"""2,000 hostile names and paths through every generator of `longspan launch`.

A value arrives as exactly one argument, or is refused in words. Shell scripts are executed, with
programs that record their arguments in place of torchrun; manifests are loaded back.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from longspan.cli.launch import TARGETS, _name_of
from longspan.errors import UserError
from longspan.launching.docker import DOCKER
from longspan.launching.job import NAME, Job, as_path
from longspan.launching.kubernetes import KINDS, KUBERNETES
from longspan.launching.manifest import dump
from longspan.launching.node_script import LOCAL
from longspan.launching.skypilot import SKYPILOT
from longspan.launching.slurm import SLURM
from tests.launching.test_kubernetes import pod_of

CASES = 2000
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The one in C is faster."""
TEXT = r"""
$( ` ;touch${IFS}canary &touch${IFS}canary |tee${IFS}canary >canary
>>canary <canary <(touch${IFS}canary) $(<canary) ${x:=canary} $'\x41' $"a" $((1+1)) ' " '' \ \\
\' \" ! !! # ~ * ? [a] {a,b} - -- -c --resume -o=x = % ^ @ : , . .. / // $ $$ $0 $1 $@ $* $HOME
$(HOME) $$(HOME) $(POD_IP) ${HOME} %s %n yes no null true 1e3 0x10 012 0o7 1:20 y | > & {{ }} {% ]
{{x}} --- ... #x EOF <<EOF <<'EOF' && || ;; () ( ) (( [[ ]] if fi done exit0 exec eval #SBATCH [
%j %x 0 1 a b run toml ü ß 漢字 ﷽ 🚀 é ̈ \n \t \0 \u0041 C:\x //evil --output=x
"""
PIECES = re.findall(r"\S+", TEXT)
PIECES += ["$(touch canary)", "`touch canary`", "; touch canary;", "&& touch canary", "> canary"]
PIECES += [" ", "  ", ": ", " #", "\n", "\r\n", "\t", "\0", "\x1b[31m", "\x7f", "\x85", "\u2028"]
PIECES += ["\u202e", "\u200b", "\ufeff", "\xa0", "\n#SBATCH --x\n", "\ntouch canary\n", "\n---\n"]


def hostile(seed: int = 0) -> list[str]:
    """As many texts as CASES, each made of one to six of the pieces."""
    chooser = random.Random(seed)
    found = dict.fromkeys(["", "-", "--", "." * 255, "a" * 5000, "'" * 2000, "$" * 1000, *PIECES])
    while len(found) < CASES:
        found["".join(chooser.choices(PIECES, k=chooser.randint(1, 6)))] = None
    return list(found)[:CASES]


def job_of(**values: Any) -> Job:
    base = {"name": "first", "run_file": "/x/run.toml", "run_dir": "/shared/runs/first"}
    base |= {"run_text": "[train]\n", "source": "/src", "nodes": 2, "max_nodes": 2}
    base |= {"gpus_per_node": 2, "processes_per_node": 2, "hardware": "h100"}
    return Job(**{**base, **values})


def refusal(**values: Any) -> str | None:
    """Why a job is refused, in one printable line, before any generator sees it; None if not."""
    try:
        job_of(**values)
    except UserError as error:
        return str(error)
    return None


def accepted(field: str, form: Callable[[str], Any]) -> list[str]:
    """The hostile texts that a job takes in a field."""
    reasons = {text: refusal(**{field: form(text)}) for text in hostile()}
    assert all(reason.isprintable() for reason in reasons.values() if reason is not None)
    return [text for text, reason in reasons.items() if reason is None]


def path(text: str) -> str:
    return f"/shared/{text}"


def file(text: str) -> str:
    return f"/shared/{text}.toml"


def override(text: str) -> tuple[str, ...]:
    return (f"a.b={text}",)


def jobs(root: str = "/shared", count: int = 60, **values: Any) -> list[Job]:
    """Jobs that together have all texts as overrides, and `count` as run file, folder and source.

    Each place is quoted by the same function; only the one of the run folder needs them all.
    """
    folders, files = accepted("run_dir", path), accepted("run_file", file)
    overrides = accepted("overrides", override)
    assert min(map(len, (folders, files, overrides))) > CASES / 2
    random.Random(1).shuffle(folders)
    count = min(count, len(folders))
    return [
        job_of(
            run_file=file(files[number % len(files)]),
            run_dir=f"{root}/{folders[number]}",
            source=path(folders[-number]),
            overrides=tuple(v for text in overrides[number::count] for v in override(text)),
            **values,
        )
        for number in range(count)
    ]


def arguments(job: Job, run_file: str = "") -> list[str]:
    """How the command of a job ends, if nothing has left its quotes."""
    file = as_path(run_file or job.run_file)
    return ["train", file, *job.overrides, "--resume", as_path(job.run_dir)]


def ends(command: Sequence[str], expected: Sequence[str]) -> bool:
    return list(command[-len(expected) :]) == list(expected)


RECORDER = """#!/bin/sh
printf '%s\\0' "$@" END >> "$RECORD"
"""


def execute(scripts: Sequence[str], folder: Path) -> list[list[str]]:
    """Run scripts in an empty folder, and return the arguments that each gives to its program.

    Nothing appears in the folder, where a `touch` or a redirection would create a file.
    """
    for name in ("scripts", "bin", "empty"):
        (folder / name).mkdir()
    for number, text in enumerate(scripts):
        (folder / "scripts" / f"{number:05}").write_text(text)
    programs = dict.fromkeys(("torchrun", "longspan", "srun"), RECORDER)
    programs |= {"scontrol": "#!/bin/sh\necho host-0\n"}
    for name, text in programs.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    environment = {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "RECORD": str(folder / "record"),
        "HOME": str(folder / "empty"),
        "LC_ALL": "C.UTF-8",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NODE_RANK": "0",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "host-[0-1]",
    }
    done = subprocess.run(
        ["bash", "-c", 'for file in ../scripts/*; do bash "$file" host-0; done'],
        cwd=folder / "empty",
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    assert done.stderr == ""
    assert list((folder / "empty").iterdir()) == []
    record = (folder / "record").read_bytes().decode()
    return [command.split("\0") for command in record.split("\0END\0")[:-1]]


def sky_script(job: Job) -> str:
    return str(read_sky(job)["run"])


def read_sky(job: Job) -> Any:
    return yaml.load(SKYPILOT.text(job), LOADER)  # noqa: S506


def sky_file(job: Job) -> str:
    return "/tmp/longspan-first/run.toml"


SCRIPTS = {"local": LOCAL.text, "slurm": SLURM.text, "skypilot": sky_script}


def test_there_are_enough_cases_and_each_target_is_tried() -> None:
    assert len(set(hostile())) == CASES
    assert {target.name for target in TARGETS} == {*SCRIPTS, "kubernetes", "docker"}


@pytest.mark.parametrize(
    ("target", "nodes", "count"),
    [("local", 2, CASES), ("local", 1, 60), ("slurm", 2, 600), ("skypilot", 2, 60)],
)
def test_scripts(target: str, nodes: int, count: int, tmp_path: Path) -> None:
    root = tmp_path / "a" / "b" / "c" / "d" / "e" / "f"  # deeper than any text goes up
    root.mkdir(parents=True)
    scripts = {}
    for job in jobs(str(root), count, nodes=nodes, max_nodes=nodes):
        with contextlib.suppress(UserError):  # Slurm has rules of its own
            scripts[job] = SCRIPTS[target](job)
    assert len(scripts) > min(count, CASES / 2) / 2
    found = execute(list(scripts.values()), tmp_path)
    for job, command in zip(scripts, found, strict=True):
        assert ends(command, arguments(job, sky_file(job) if target == "skypilot" else ""))
        assert not {*command[: -len(arguments(job))]} & {*job.overrides, job.run_file}


def expand(text: str, values: dict[str, str]) -> str:
    """What Kubernetes makes of a container's argument: $(NAME) is a variable, $$ is a dollar."""

    def replace(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        return values.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^()]*)\)", replace, text)


@pytest.mark.parametrize("kind", KINDS)
def test_kubernetes(kind: str) -> None:
    for job in jobs(kind=kind, count=60 if kind == "job" else 10):
        plain = job_of(kind=kind, overrides=("a.b=c",) * len(job.overrides))
        benign, found = (load(KUBERNETES.text(each)) for each in (plain, job))
        (key,) = found["ConfigMap"].pop("data")
        del benign["ConfigMap"]["data"]
        assert shape(found) == shape(benign)
        variables = {"POD_IP": "10.0.0.7", "HOME": "/tmp"}
        pod = pod_of(found)[1]
        command = [expand(word, variables) for word in pod["containers"][0]["command"]]
        assert ends(command, arguments(job, f"/etc/longspan/{key}"))
        assert command[1:3] == ["--local-addr", "10.0.0.7"]
        check = [expand(word, variables) for word in pod["initContainers"][0]["command"]]
        assert ends(check, [f"/etc/longspan/{key}", *job.overrides, "--nproc", "4"])


def load(text: str) -> dict[str, dict[str, Any]]:
    """The objects of a manifest, by kind."""
    return {found["kind"]: found for found in yaml.load_all(text, LOADER)}


def shape(value: Any) -> Any:
    """A manifest without its texts: its keys, and the types of its values."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [shape(inner) for inner in value]
    return type(value).__name__


def test_texts_in_yaml() -> None:
    """Any text, also what a name may not have, is read back; both by PyYAML and by libyaml."""
    values = {str(number): text for number, text in enumerate(hostile())}
    values |= {f"lines {number}": f"a\n{text}\n b" for number, text in enumerate(hostile())}
    text = dump(values)
    assert yaml.safe_load(text) == values
    assert yaml.load(text, LOADER) == values  # noqa: S506


@pytest.mark.parametrize("text", ["1e3", "0o7", "0x1f", "1:20", "y", "n", "no", "~", "1_000", ".5"])
def test_texts_that_other_readers_take_for_something_else_are_quoted(text: str) -> None:
    """Kubernetes reads YAML with other rules than PyYAML: 1e3 is a number there."""
    assert dump({"key": text}) == f"key: '{text}'\n"


def test_skypilot() -> None:
    for job in jobs():
        found = read_sky(job)
        assert found["workdir"] == job.source
        assert found["file_mounts"] == {sky_file(job): job.run_file}
        assert found["num_nodes"] == 2


def test_dockerfiles() -> None:
    base = {"nodes": 1, "max_nodes": 1}
    benign = DOCKER.text(job_of(**base)).splitlines()
    for job in jobs(**base):
        lines = DOCKER.text(job).split("\n")
        *before, command, end = lines
        assert end == ""
        assert len(before) == len(benign) - 1
        assert before[4:] == benign[4:-1]
        assert command.startswith("CMD [")
        expected = arguments(job, "/etc/longspan/run.toml")
        assert ends(json.loads(command.removeprefix("CMD ")), expected)


@pytest.mark.parametrize("field", ["name", "partition", "account", "image", "namespace", "volume"])
def test_names_are_plain_or_refused(field: str) -> None:
    for text in [*hostile(), *(f"a{text}" for text in hostile())]:
        reason = refusal(**{field: text})
        if reason is None:
            assert re.fullmatch(r"([a-zA-Z0-9_][a-zA-Z0-9._,/:@+-]{0,254})?", text), text
        else:
            assert reason.isprintable()


def test_the_name_of_a_job_is_made_from_any_file_name() -> None:
    for text in hostile():
        if text and not set(text) & {"/", "\0"}:
            assert NAME.fullmatch(_name_of(Path(text))), text


def test_commands_that_submit_take_any_file() -> None:
    """The printed command, pasted into a shell, gives the file as one argument."""
    for target in TARGETS:
        for text in accepted("run_dir", path)[::20]:
            command = target.submit(job_of(), text)
            assert shlex.split(shlex.join(command)) == command
            assert as_path(text) in command or target is LOCAL


@pytest.mark.parametrize("nodes", [1, 2])
def test_shellcheck_finds_nothing(nodes: int, tmp_path: Path) -> None:
    """In plain and in hostile scripts; `bash -n` too."""
    some = [job_of(nodes=nodes, max_nodes=nodes), *jobs(nodes=nodes, max_nodes=nodes, count=10)]
    files: list[Path] = []
    for write in SCRIPTS.values():
        for job in some:
            with contextlib.suppress(UserError):  # Slurm has rules of its own
                text = write(job)
                files.append(tmp_path / f"{len(files)}.sh")
                files[-1].write_text(text if text.startswith("#!") else f"#!/bin/bash\n{text}")
    for file in files:
        subprocess.run(["bash", "-n", file], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not on this machine")
    # SC2016: an expression in single quotes is not expanded, as it should be here.
    subprocess.run(["shellcheck", "-e", "SC2016", "-S", "warning", *files], check=True)

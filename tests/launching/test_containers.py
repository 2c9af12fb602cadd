"""Dockerfile, .dockerignore and SkyPilot's task."""

from __future__ import annotations

import fnmatch
import io
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from longspan.cli import main
from longspan.errors import UserError
from longspan.hardware import devices
from longspan.launching.docker import CONTEXT, DOCKER, dockerfile
from longspan.launching.job import ENVIRONMENT, TIMEOUTS, Job, port_of
from longspan.launching.skypilot import ACCELERATORS, SKYPILOT, task
from longspan.runfile import dump_run, load_run
from tests.launching.test_job import recorded
from tests.test_docs import ROOT


def job_of(**values: Any) -> Job:
    base = {"name": "first", "run_file": "/home/me/run.toml", "run_dir": "/shared/runs/first"}
    base |= {"gpus_per_node": 8, "processes_per_node": 8, "hardware": "h100", "source": "/src"}
    return Job(**{**base, **values})


def test_the_dockerfile_of_the_repository_is_the_generated_one() -> None:
    assert (ROOT / "Dockerfile").read_text() == dockerfile()


def test_a_parser_reads_the_dockerfile() -> None:
    """By the package dockerfile-parse."""
    parser = pytest.importorskip(
        "dockerfile_parse", reason="the package dockerfile-parse is not installed"
    )
    text = DOCKER.text(job_of(overrides=('a.b="it\'s" $HOME',), run_dir="/shared/a b"))
    found = parser.DockerfileParser(fileobj=io.BytesIO(text.encode()))
    assert found.parent_images == ["python:3.11-slim-bookworm"] * 2
    names = [line["instruction"] for line in found.structure]
    known = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "CMD", "COMMENT"}
    assert set(names) == known
    assert names.index("USER") < names.index("CMD")
    assert json.loads(found.cmd) == [
        *["torchrun", "--nnodes", "1", "--nproc-per-node", "8", "--max-restarts", "10"],
        *["--standalone", "-m", "longspan", "train", "/etc/longspan/run.toml"],
        *['a.b="it\'s" $HOME', "--resume", "/shared/a b"],
    ]
    variables = {name: value for name, (value, _) in ENVIRONMENT.items()}
    assert {name: found.envs[name] for name in variables} == variables


def test_docker_itself_checks_the_dockerfile() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "buildx", "version"], check=False).returncode:
        pytest.skip("docker with buildx is not on this machine")
    command = [docker, "build", "--check", "-f", "-", str(ROOT)]
    for text in (dockerfile(), DOCKER.text(job_of())):
        subprocess.run(command, input=text, text=True, check=True)


def is_sent(path: str, rules: list[str]) -> bool:
    """Whether .dockerignore lets a file through: the last rule that matches it decides."""
    parts, sent = Path(path).parts, True
    for rule in rules:
        pattern = rule.removeprefix("!")
        heads = ["/".join(parts[: n + 1]) for n in range(len(parts))]
        if pattern.startswith("**/"):
            matches = any(fnmatch.fnmatch(part, pattern[3:]) for part in parts)
        else:
            matches = any(fnmatch.fnmatch(head, pattern) for head in heads)
        sent = rule.startswith("!") if matches else sent
    return sent


def test_docker_gets_what_builds_the_wheel_and_nothing_else(tmp_path: Path) -> None:
    """The wheel is built from the files that are sent, as in the Dockerfile."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    tracked = [str(p.relative_to(ROOT)) for p in ROOT.glob("*") if p.is_file()]
    tracked += [str(p.relative_to(ROOT)) for p in (ROOT / "src").rglob("*") if p.is_file()]
    sent = [path for path in tracked if is_sent(path, rules)]
    assert {Path(path).parts[0] for path in sent} == set(CONTEXT)
    for path in (".git/config", "runs/a/run.toml", "tests/x.py", "src/longspan/__pycache__/x.pyc"):
        assert not is_sent(path, rules), path
    for path in sent:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, tmp_path / path)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "-w", tmp_path / "dist", tmp_path], check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("longspan-*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    for file in (ROOT / "src" / "longspan").rglob("*"):
        if file.suffix in (".py", ".toml", ".typed"):
            assert str(file.relative_to(ROOT / "src")) in inside


@pytest.mark.parametrize("nodes", [1, 3])
def test_skypilot_runs_torchrun_on_each_node(nodes: int, tmp_path: Path) -> None:
    job = job_of(nodes=nodes, max_nodes=nodes, overrides=("train.steps=7",))
    found = yaml.safe_load(task(job))
    assert (found["name"], found["num_nodes"]) == ("first", nodes)
    assert found["resources"]["accelerators"] == {"H100": 8}
    ((there, here),) = found["file_mounts"].items()
    assert here == "/home/me/run.toml"
    addresses = "\n".join(f"10.0.0.{n}" for n in range(1, nodes + 1))
    environment = {"SKYPILOT_NODE_RANK": str(nodes - 1), "SKYPILOT_NODE_IPS": addresses}
    expected = f"--nnodes {nodes} --nproc-per-node 8 --max-restarts 10"
    if nodes == 1:
        expected += " --standalone"
    else:
        expected += " --local-addr 10.0.0.3 --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:"
        expected += f"{port_of('first')} --rdzv-id first --rdzv-conf {TIMEOUTS},is_host=0"
    expected += f" -m longspan train {there} train.steps=7 --resume /shared/runs/first"
    assert recorded(found["run"], tmp_path, **environment) == expected.split()
    if nodes > 1:
        environment["SKYPILOT_NODE_RANK"] = "0"
        assert f"{TIMEOUTS},is_host=1" in recorded(found["run"], tmp_path, **environment)


def test_skypilot_installs_longspan_or_uses_an_image() -> None:
    from_source = yaml.safe_load(task(job_of()))
    assert from_source["workdir"] == "/src"
    assert from_source["setup"] == "python3 -m pip install -c constraints.txt .\n"
    image = yaml.safe_load(task(job_of(image="team/longspan:1")))
    assert image["resources"]["image_id"] == "docker:team/longspan:1"
    assert not {"setup", "workdir"} & image.keys()
    cpus = yaml.safe_load(task(job_of(gpus_per_node=0, processes_per_node=4, hardware="")))
    assert cpus["resources"]["cpus"] == "4+"


def test_skypilot_itself_reads_the_task() -> None:
    sky = pytest.importorskip("sky", reason="the package skypilot is not installed")
    assert ACCELERATORS.keys() == devices().keys()
    for hardware in devices():
        found = sky.Task.from_yaml_config(yaml.safe_load(task(job_of(hardware=hardware))))
        assert found.num_nodes == 1


@pytest.mark.parametrize(
    ("target", "values", "message"),
    [
        (DOCKER, {"nodes": 2, "max_nodes": 2}, "docker runs one node, but --nodes asks for 2"),
        (SKYPILOT, {"max_nodes": 2}, "--nodes 1:2 has hot spares, which skypilot does not support"),
        (SKYPILOT, {"hardware": ""}, "skypilot needs the kind of GPU: give --hardware"),
    ],
)
def test_what_a_target_does_not_support_is_refused(
    target: Any, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as raised:
        target.text(job_of(**values))
    assert message in str(raised.value)


def test_the_source_is_found_and_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(dump_run(load_run(None, ["train.device=auto"])))
    words = [str(file), "--gpus", "1", "--hardware", "h100"]
    assert main(["launch", "docker", *words]) == 0
    hint = f"docker build -f FILE -t longspan {ROOT}"
    assert hint in " ".join(capsys.readouterr().err.split())
    assert main(["launch", "skypilot", *words, "--source", str(tmp_path)]) == 2
    text = f"{tmp_path} is not the source of longspan: it has no constraints.txt"
    assert text in capsys.readouterr().err
    assert main(["launch", "skypilot", *words, "--submit"]) == 2
    assert "--submit needs -o FILE: sky reads a file only" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "/nowhere")
    for target, program in (("docker", "docker"), ("skypilot", "sky")):
        out = tmp_path / target
        assert main(["launch", target, *words, "--submit", "-o", str(out)]) == 2
        assert f"--submit needs the program {program}" in capsys.readouterr().err
        assert not out.exists()

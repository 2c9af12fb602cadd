"""Fuzzing by structure: fields of files that others wrote are changed, and checksums recomputed.

Token shards are fuzzed in tests/data/test_fuzz.py, and run files in test_security.py.

Each case must end within seconds and a gigabyte, and either be refused with a UserError or be in
effect exactly as the files say. A failure names its case: `LONGSPAN_FUZZ_CASE=checkpoint-17` runs
that one alone. `make fuzz` runs 100,000 cases; `LONGSPAN_FUZZ_PART=3/8` leaves 7 of 8 to others.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from safetensors.torch import load_file, save_file

from longspan import checkpoint, planning
from longspan.benchmarks import step_time
from longspan.checkpoint.format import _canonical
from longspan.data.tokenizer import load_tokenizer
from longspan.errors import UserError
from longspan.export.config_json import hf_config, hf_name
from longspan.export.huggingface import INDEX, weight_reader
from longspan.export.tokenizer import byte_tokenizer_json
from longspan.hardware import cpu_device, device_of
from longspan.hf_config import HARMLESS, read_folder_config
from longspan.models import new_decoder, parameter_shapes
from longspan.planning import predict
from longspan.reporting import read_input, render
from longspan.runfile import load_run
from longspan.training.step import train_step
from tests.steps import open_state
from tests.training.test_state import SMALL

CASES = int(os.environ.get("LONGSPAN_FUZZ_CASES", "1000"))
ONLY = os.environ.get("LONGSPAN_FUZZ_CASE", "")
PART, PARTS = map(int, os.environ.get("LONGSPAN_FUZZ_PART", "0/1").split("/"))
CPU_SECONDS, SECONDS, MEMORY = 5, 120, 1 << 30
"""Limits of one case: of its own time on the CPU, of waiting, and of memory beyond the start."""

VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 3, 2**31, 2**40, 2**62, 2**63, 10**15, 10**400, 0.5, 1.5, -0.0,
    1e-300, 1e300, float("nan"), float("inf"), "", "x", "a.b", "../../etc/passwd", "/tmp/x", "\x00",
    "\x1b[2J", "\ud800", "ä" * 300, [], {}, [[]], {"a": None}, [0] * 1000, "F32", "x.bin",
    "model-00000.safetensors", "I64", "BF16", "llama", [2**40, 2**40], [1, -1], {"scale": 0},
]  # fmt: skip


MAX_REPEATED = 1 << 20
"""Bytes of a value that is repeated; larger files are refused before they are read."""


class Stuck(Exception):
    """A case has run for too long."""


def mutated(value: Any, rng: random.Random) -> Any:
    """Return `value` with something replaced, removed, duplicated, nested or renamed."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        changed = dict(value)
        match rng.randrange(8):
            case 0:
                del changed[key]
            case 1:
                changed[str(rng.choice(VALUES))[:50]] = changed.pop(key)
            case 2:
                changed[str(rng.choice(VALUES))[:50]] = changed[key]
            case 3:
                other = rng.choice(sorted(value))
                changed[key], changed[other] = changed[other], changed[key]
            case _:
                changed[key] = mutated(changed[key], rng)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.8:
        index = rng.randrange(len(value))
        item = [mutated(value[index], rng)]
        return value[:index] + item * rng.randrange(3) + value[index + 1 :]
    if type(value) is int and rng.random() < 0.5:
        return value + rng.choice([-1, 1, 2, 2**20, -value])
    if rng.random() < 0.05:
        if rng.random() < 0.5:
            return json.loads("[" * 200 + "]" * 200)
        return [value] * max(2, min(10_000, MAX_REPEATED // len(json.dumps(value))))
    return rng.choice(VALUES)


def mutated_text(content: bytes, rng: random.Random) -> bytes:
    """A JSON file with one to three changes, or broken as text."""
    body = json.loads(content)
    for _ in range(rng.randint(1, 3)):
        body = mutated(body, rng)
    text = json.dumps(body, indent=1).encode() + b"\n"
    match rng.randrange(60):
        case 0:
            return text[: rng.randrange(len(text))]
        case 1:
            return text.replace(b"1", b"1" * 5000, 1)
        case 2:
            return b"[" * 100_000
        case 3:
            return text.replace(b"{", b'{"twice": 1, "twice": 2, ', 1)
        case 4:
            return text + b" " * (17 << 20)
    return text


def mutated_safetensors(content: bytes, rng: random.Random) -> bytes:
    """A safetensors file whose header, length or data is changed."""
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    match rng.randrange(6):
        case 0:
            length = rng.choice([0, 1, length - 1, length + 1, 2**40, 2**63, 2**64 - 1])
            return length.to_bytes(8, "little") + header + data
        case 1:
            data = data[: rng.randrange(len(data))] if rng.random() < 0.5 else data + bytes(8)
        case _:
            header = mutated_text(header, rng)
    return len(header).to_bytes(8, "little") + header + data


def replace_kind(path: Path, outside: Path, rng: random.Random) -> None:
    """Put something that is not a regular file of its folder in place of a file."""
    content = path.read_bytes()
    path.unlink()
    match rng.randrange(5):
        case 0:
            os.mkfifo(path)
        case 1:
            path.symlink_to("/dev/zero")
        case 2:
            outside.write_bytes(content)
            path.symlink_to(outside)
        case 3:
            path.mkdir()
        case _:
            path.write_bytes(content)
            os.truncate(path, 1 << 42)


@contextmanager
def limits() -> Iterator[None]:
    """Raise in a case that takes too long; allocations beyond MEMORY fail."""

    def fail(number: int, frame: object) -> None:
        raise Stuck(signal.Signals(number).name)

    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    handlers = {each: signal.signal(each, fail) for each in (signal.SIGVTALRM, signal.SIGALRM)}
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, before[1]))
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        for each, handler in handlers.items():
            signal.signal(each, handler)


Change = Callable[[Path, random.Random], None]


def fuzz(
    name: str, folder: Path, share: float, change: Change, use: Callable[[Path], None]
) -> None:
    """Change copies of `folder` and `use` each: it raises UserError, or asserts what is in effect.

    Nothing beside the copy may change, and both outcomes must occur.
    """
    (folder.parent / "secret").write_text("not yours")
    before = files_below(folder.parent)
    work, outside = folder.parent / "work", folder.parent / "outside"
    refused = accepted = 0
    failures = []
    for case in range(PART, int(CASES * share), PARTS):
        if ONLY and f"{name}-{case}" != ONLY:
            continue
        rng = random.Random(f"{name}-{case}")
        shutil.copytree(folder, work, symlinks=True)
        if rng.random() < 0.05:
            files = sorted(path for path in work.rglob("*") if path.is_file())
            replace_kind(rng.choice(files), outside, rng)
        else:
            change(work, rng)
        try:
            with limits():
                use(work)
            accepted += 1
        except UserError as error:
            str(error).encode("utf-8", "backslashreplace")
            refused += 1
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if ONLY:
                raise
            failures.append(f"LONGSPAN_FUZZ_CASE={name}-{case}: {error!r}")
        shutil.rmtree(work)
        outside.unlink(missing_ok=True)
        if files_below(folder.parent) != before:
            failures.append(f"{name}-{case} wrote elsewhere")
            before = files_below(folder.parent)
    assert not failures, "\n".join(failures)
    assert ONLY or (refused and accepted), (refused, accepted)


def files_below(folder: Path) -> dict[str, tuple[int, int]]:
    """The size and modification time of each file, by path."""
    return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in folder.rglob("*")
            if p.is_file()}  # fmt: skip


def test_checkpoints(tmp_path: Path) -> None:
    """Restored tensors and state are those of the files, whatever was accepted."""
    run = load_run(None, [*SMALL, "model.hidden=8", "model.ffn=8", "model.vocab=64"], world=1)
    with open_state(run) as (state, data):
        for _ in range(2):
            train_step(state, data, run.train, torch.device("cpu"))
        saved = checkpoint.save(tmp_path / "run", 2, state.tensor_shards(), state.saved_state())
        groups = sorted(path.name for path in saved.glob("*.safetensors"))

        def change(work: Path, rng: random.Random) -> None:
            path = work / saved.name
            manifest = path / "manifest.json"
            body = json.loads(manifest.read_bytes())
            del body["sha256"]
            if rng.random() < 0.25:
                file = path / rng.choice(groups)
                file.write_bytes(mutated_safetensors(file.read_bytes(), rng))
                body["files"][file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
            else:
                part = rng.choice([None, "state", "state", "tensors"])
                target = body if part is None else body[part]
                changed = json.loads(mutated_json(target, rng))
                body = changed if part is None else {**body, part: changed}
            if isinstance(body, dict):
                body["sha256"] = hashlib.sha256(_canonical(body)).hexdigest()
            manifest.write_text(json.dumps(body, indent=1) + "\n")

        def use(work: Path) -> None:
            opened = checkpoint.open_checkpoint(work / saved.name)
            opened.check()
            state.restore(opened)
            found = state.tensor_shards()
            stored = {
                k: x for file in groups for k, x in load_file(work / saved.name / file).items()
            }
            assert found.keys() == stored.keys()
            assert all(torch.equal(x.values, stored[k]) for k, x in found.items())
            told, now = opened.state, state.saved_state()
            assert (state.step, now["samples"]) == (2, told["samples"])
            assert now["skips"] == told.get("skips", [])
            norm = told.get("norm_average", {})
            assert now["norm_average"]["norm"] == pytest.approx(norm.get("norm", 0), rel=1e-6)
            assert now["norm_average"]["steps"] == norm.get("steps", 0)

        fuzz("checkpoint", tmp_path / "run", 0.45, change, use)


def mutated_json(value: Any, rng: random.Random) -> str:
    for _ in range(rng.randint(1, 3)):
        value = mutated(value, rng)
    return json.dumps(value)


def test_hugging_face_folders(tmp_path: Path) -> None:
    """Weights that are read are those of the files, with the settings of config.json."""
    options = [*SMALL, "model.vocab=128"]
    run = load_run(None, options, world=1)
    folder, torch_seed = tmp_path / "llama", torch.Generator().manual_seed(0)
    folder.mkdir()
    shapes = parameter_shapes(new_decoder(run))
    weights = {hf_name(n): torch.randn(s, generator=torch_seed) for n, s in shapes.items()}
    names = sorted(weights)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, keys in halves.items():
        save_file({key: weights[key] for key in keys}, folder / file)
    index = {key: file for file, keys in halves.items() for key in keys}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config = hf_config(run, {"eos_token_id": 0})
    (folder / "config.json").write_text(json.dumps(config))

    def change(work: Path, rng: random.Random) -> None:
        path = work / rng.choice(["config.json", "config.json", INDEX, *halves])
        is_json = path.suffix == ".json"
        path.write_bytes((mutated_text if is_json else mutated_safetensors)(path.read_bytes(), rng))

    def use(work: Path) -> None:
        found = load_run(None, [*options, f"train.init_from={work}"], world=1)
        read = weight_reader(work, found)
        theirs = read_folder_config(work)
        stored = load_file(work / "a.safetensors") | load_file(work / "b.safetensors")
        for name, shape in shapes.items():
            values = read(name, checkpoint.Region.full(shape))
            assert torch.equal(values, stored[hf_name(name)])
        fields = json.loads((work / "config.json").read_text())
        changed = {k for k in fields.keys() | config.keys() if fields.get(k) != config.get(k)}
        for key in changed - HARMLESS:
            match key:
                case "rope_theta" | "rms_norm_eps":
                    default = {"rope_theta": 10_000.0, "rms_norm_eps": 1e-6}[key]
                    value = default if fields.get(key) is None else fields[key]
                    assert getattr(theirs, key) == value
                case "max_position_embeddings":
                    assert theirs.max_positions == fields.get(key, 2048)
                case "longspan":
                    given = {"attention": {}} if fields.get(key) is None else fields[key]
                    expected = {**config[key]["attention"], **given.pop("attention")}
                    assert theirs.attention.model_dump(mode="json") == expected
                    assert not given
                case _:  # only where it means the same
                    assert fields.get(key) in (None, False, 1, 1.0, {}, "swish"), key
        if theirs.max_positions >= found.data.context:  # else it is extended
            assert found.model.rope_theta == theirs.rope_theta

    fuzz("llama", folder, 0.45, change, use)


def test_tokenizers_of_a_run(tmp_path: Path) -> None:
    """Any tokenizer that is accepted encodes within its vocabulary."""
    pytest.importorskip("tokenizers")
    folder = tmp_path / "run"
    folder.mkdir()
    content = byte_tokenizer_json("\0") | {"normalizer": {"type": "NFC"}}
    (folder / "tokenizer.json").write_text(json.dumps(content))

    def change(work: Path, rng: random.Random) -> None:
        path = work / "tokenizer.json"
        path.write_bytes(mutated_text(path.read_bytes(), rng))

    def use(work: Path) -> None:
        tokenizer = load_tokenizer(work)
        ids = tokenizer.encode("def f(x): return 'ä' <|endoftext|>")
        assert all(0 <= i < tokenizer.vocab for i in ids)
        tokenizer.decode(ids)

    fuzz("tokenizer", folder, 0.1, change, use)


def test_devices_and_results_of_benchmarks(tmp_path: Path) -> None:
    """Tables of devices plan a run, and results of `bench step-time` are fitted or refused."""
    folder = tmp_path / "given"
    folder.mkdir()
    device = {
        "title": "Mine", "match": "Mine", "gib": 64, "tflops": {"bf16": 400.0, "fp32": 50},
        "tb_s": 2.5, "link_gb_s": 100, "net_gb_s": 50, "gpus_per_node": 4, "watts": 500,
        "usd_per_h": 2.5, "priced": "2026-05",
    }  # fmt: skip
    run = load_run(None, [*SMALL, "train.precision=bf16"], world=1)
    (folder / "mine.toml").write_text(tomli_w.dumps({"mine": device}))
    row = {"device": "h200", "overrides": ["data.context=64"], "tokens_per_s": 5e4}
    (folder / "result.json").write_text(json.dumps({"machine": "a test", "rows": [row]}))

    def change(work: Path, rng: random.Random) -> None:
        if rng.random() < 0.5:
            path = work / "result.json"
            path.write_bytes(mutated_text(path.read_bytes(), rng))
            return
        tables = json.loads(mutated_json({"mine": device}, rng))
        try:
            (work / "mine.toml").write_text(tomli_w.dumps(tables))
        except (AttributeError, TypeError, ValueError):  # what TOML cannot say
            (work / "mine.toml").write_text(json.dumps(tables))

    def use(work: Path) -> None:
        for found in step_time._read(work / "result.json").rows:
            load_run(None, found.overrides, builtin="cuda", world=1)
        mine = device_of(str(work / "mine.toml"))
        assert mine.title.isprintable()
        predicted = predict(run, 1, mine).tokens_per_s
        assert math.isfinite(predicted)
        assert predicted > 0

    fuzz("device", folder, 0.05, change, use)


def test_plans_on_a_page(tmp_path: Path) -> None:
    """Any plan.json is refused or drawn."""
    folder = tmp_path / "given"
    folder.mkdir()
    plan = planning.plan(
        load_run(None, [*SMALL, "train.precision=fp32"], world=1), 1, cpu_device(1)
    ).as_dict()
    (folder / "plan.json").write_text(json.dumps(plan))

    def change(work: Path, rng: random.Random) -> None:
        path = work / "plan.json"
        path.write_bytes(mutated_text(path.read_bytes(), rng))

    def use(work: Path) -> None:
        assert render([read_input(work / "plan.json")])

    fuzz("plan", folder, 0.03, change, use)

"""Reads run files: TOML or YAML, dotted overrides, and all problems reported at once."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, get_args, get_origin

import tomli_w
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from longspan import presets
from longspan.builtin import follow, read_builtin
from longspan.config import AXES, DILATED, Data, Model, Run, Section
from longspan.errors import UserError
from longspan.from_folder import fill_from_folder, folder_key
from longspan.locking import LOCK
from longspan.progress import loading
from longspan.rules import Problem, check_rules
from longspan.toml import tomllib
from longspan.vocabulary import is_folder, rounded_vocab, vocab_of_data
from longspan.wording import counted, did_you_mean, toml_value

ONE_PROCESS = [
    *[f"layout.{axis}=1" for axis in AXES],
    "layout.gradient_compression=none",
    "layout.offload=false",
    "engine.name=native",
]
"""Overrides that make any run a run of one process."""

KEY = r'(?:"[^"]*"|[^."=]+)'
"""A key in the path of an override; it is quoted if it contains a dot."""

AUTO = "auto"
"""What `layout` may be instead of a table."""

RUN_FILE = "run.toml"
"""Name of the run file in a run folder."""

CHECKPOINTS = "checkpoints"
DRAFT = r"\.step-[0-9]+\.(tmp|removed)"
"""What a run leaves in its folder of checkpoints that is killed while it saves or removes one."""

OURS = {RUN_FILE, CHECKPOINTS, LOCK, "env.json", "tokenizer.json", "tokenizer_config.json"}
OURS |= {"metrics.jsonl", "history.jsonl", "heartbeats", "logs", "micro_batch", "STOP", "SAVE"}
OURS |= {
    "huggingface",
    "sinks.json",
    "tensorboard",
    "wandb",
    "mlruns",
    "profile",
    "report.html",
    "rendezvous",
}
"""All that a run has in its folder."""

SECTIONS: dict[str, type[Section]] = {
    name: field.annotation  # type: ignore[misc]
    for name, field in Run.model_fields.items()
}


def load_run(
    path: str | Path | None = None,
    overrides: Iterable[str] = (),
    *,
    builtin: str = "cpu",
    world: int | None = 1,
    hardware: str | None = None,
) -> Run:
    """Load the run file `path`, or the built-in run `builtin`, with section.key=value overrides.

    The layout is checked for `world` processes; None skips that check. `layout = "auto"` becomes
    the layout for `world` devices of this machine, or of the GPU `hardware`, a name in the table or
    a TOML file; without a world it stays unresolved.
    """
    name = str(path) if path else f'built-in run "{builtin}"'
    base = _read(Path(path)) if path else read_builtin(builtin)
    changes = dict(map(_parse_override, overrides))
    if path is None and changes.get(("model", "factory")):  # a built-in run is one of the decoder
        base = {"train": {"device": base["train"].get("device", "auto")}}
    tables = _override(base, changes)
    if path is None:
        given = {".".join(keys) for keys in changes}
        _drop_builtin_model(tables, given)
        tables = follow(tables, given, world)
    replaced = {
        (section, key): table[key]
        for section, key, *_ in (keys for keys in changes if len(keys) > 1)
        if isinstance(table := base.get(section), dict) and key in table
    }
    return parse_run(tables, name, world=world, replaced=replaced, hardware=hardware)


def parse_run(
    tables: Mapping[str, Any],
    name: str = "run",
    *,
    world: int | None = 1,
    replaced: Mapping[tuple[str, str], Any] | None = None,
    hardware: str | None = None,
) -> Run:
    """Validate plain tables into a Run, or raise one UserError that lists every problem.

    `replaced`: what the overridden keys, as (section, key), would be without the overrides.
    `world` and `hardware`: see `load_run`.
    """
    is_auto = tables.get("layout") == AUTO
    if is_auto:
        tables = {**tables, "layout": {}}
    problems = _problems_of_factory(tables)
    if problems is None:
        tables, folder, problems = fill_from_folder(dict(tables))
        tables = _fill_vocab(_fill_branches(tables))
    else:
        folder = None
    problems += [
        Problem(key, f"unknown section{_suggest_section(key)}")
        for key in tables
        if key not in SECTIONS
    ]
    sections: dict[str, Section] = {}
    for key, section in SECTIONS.items():
        table = tables.get(key, {})
        if isinstance(table, Mapping):
            unknown = [field for field in table if field not in section.model_fields]
            problems += [
                Problem(f"{key}.{field}", f"unknown key{_suggest(field, key)}") for field in unknown
            ]
            table = {field: table[field] for field in table if field not in unknown}
        try:
            sections[key] = section.model_validate(table)
        except ValidationError as error:
            # An error in a key that was not given follows from one in a key that was.
            details = [d for d in error.errors() if not d["loc"] or d["loc"][0] in table]
            otherwise = _without_wrong_keys(key, table, details, replaced or {})
            problems += [_explain(key, detail, otherwise, replaced or {}) for detail in details]
    problems += check_rules(sections, None if is_auto else world)
    if folder and isinstance(model := sections.get("model"), Model):
        differing = folder.disagreements(model, folder_key(tables))
        problems += [Problem(path, text) for path, text in differing.items()]
    if problems:
        raise UserError(_render(name, problems))
    run = Run(**sections)  # type: ignore[arg-type]
    return _with_layout(run, world, hardware) if is_auto else run


def _with_layout(run: Run, world: int | None, hardware: str | None) -> Run:
    """The run with the layout that "auto" stands for."""
    if world is None:
        return run.model_copy(update={"layout": run.layout.taken_for("")})
    with loading(quiet=os.environ.get("RANK", "0") != "0"):
        from longspan.planning.auto import choose_layout  # which imports torch

    return choose_layout(run, world, hardware)


def dump_run(run: Run) -> str:
    """Return the run as TOML with all defaults written out; unset optional keys are omitted.

    With `model.factory`, so are the keys that have no effect then.
    """
    tables = run.model_dump(mode="json", exclude_none=True)
    if run.model.factory:
        tables |= {"model": {"factory": run.model.factory}}
        tables |= {"data": {key: tables["data"][key] for key in FACTORY_DATA_KEYS}}
        del tables["attention"]
    if run.layout.is_unresolved:
        tables["layout"] = AUTO
    return tomli_w.dumps(tables)


FACTORY_DATA_KEYS = ("accept_changed",)
"""The keys of [data] that hold for the dataset of a user's own task."""


def _problems_of_factory(tables: Mapping[str, Any]) -> list[Problem] | None:
    """Return the keys that have no effect with `model.factory`; None without it."""
    model = tables.get("model")
    if not isinstance(model, Mapping) or not model.get("factory"):
        return None
    allowed = {
        "model": ("factory",),
        "attention": (),
        "data": FACTORY_DATA_KEYS,
    }
    return [
        Problem(f"{section}.{key}", "has no effect with model.factory: remove it")
        for section, keys in allowed.items()
        if isinstance(table := tables.get(section, {}), Mapping)
        for key in table
        if key in SECTIONS[section].model_fields and key not in keys
    ]


def new_run_dir(parent: Path, run_file: Path | None) -> Path:
    """Return an unused folder name made of the run file's name and the time."""
    stem = f"{run_file.stem if run_file else 'builtin'}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (stem if n == 1 else f"{stem}-{n}" for n in range(1, 1000))
    return next(parent / name for name in names if not (parent / name).exists())


def saved_run_file(run_dir: Path) -> Path:
    """Return the path of the run file in a run folder."""
    path = run_dir / RUN_FILE
    if not path.exists():
        text = f"{run_dir} is not a run folder: it has no {RUN_FILE}"
        if run_dir.is_dir() and all(map(_is_ours, run_dir.iterdir())):
            text += "; to start the run in it, give its run file too, or --run-dir"
        raise UserError(text)
    return path


def _fill_branches(tables: dict[str, Any]) -> dict[str, Any]:
    """Give a dilated [attention] without branches those that fit the model preset and context."""
    model, attention, data = (tables.get(key, {}) for key in ("model", "attention", "data"))
    if not all(isinstance(table, Mapping) for table in (model, attention, data)):
        return tables
    has_branches = {"segment_lengths", "dilation_rates"} & set(attention)
    if attention.get("kind", "dilated") not in DILATED or has_branches:
        return tables
    try:
        context = Data.model_validate({"context": data.get("context", Data().context)}).context
    except ValidationError:  # reported by itself, not by branches that it does not have
        context = Data().context
    segment = presets.SEGMENTS.get(str(model.get("preset", "tiny")), presets.SEGMENTS["tiny"])
    lengths, rates = presets.branches(segment, context)
    branches = {"segment_lengths": lengths, "dilation_rates": rates}
    return {**tables, "attention": {**branches, **attention}}


def _fill_vocab(tables: dict[str, Any]) -> dict[str, Any]:
    """Give a [model] without vocab that of the tokenizer of the data, if it is there to be read."""
    model, data = tables.get("model", {}), tables.get("data", {})
    if not isinstance(model, Mapping) or not isinstance(data, Mapping) or "vocab" in model:
        return tables
    source = data.get("source")
    vocab = vocab_of_data(source) if is_folder(source) else None
    if vocab is None:
        return tables
    return {**tables, "model": {**model, "vocab": rounded_vocab(vocab)}}


def _drop_builtin_model(tables: dict[str, Any], given: Collection[str]) -> None:
    """Remove what a built-in run says of its model if other data or a folder decides that.

    Keys in `given` (section.key) are the user's and stay.
    """
    model, data = tables.get("model"), tables.get("data")
    if not (isinstance(model, dict) and isinstance(data, dict)):
        return
    if folder_key(tables):
        for section in ("model", "attention"):
            if isinstance(table := tables.get(section), dict):
                for key in [key for key in table if not _is_given(f"{section}.{key}", given)]:
                    del table[key]
    elif "model.vocab" not in given:
        has_own = "family" in presets.MODELS.get(str(model.get("preset")), {})
        if has_own or is_folder(data.get("source")):
            model.pop("vocab", None)


def _is_given(path: str, given: Collection[str]) -> bool:
    return any(key == path or key.startswith(f"{path}.") for key in given)


def check_run_folder(run_dir: Path, *, resume: bool) -> None:
    """Refuse a folder that is neither new nor the run to resume.

    A run that was killed before its first checkpoint left nothing to lose: its folder counts as
    new, with a run file or without. A folder with files of others never does.
    """
    try:
        found = list(run_dir.iterdir()) if run_dir.exists() else []
        checkpoints = run_dir / CHECKPOINTS
        saved = [path.name for path in checkpoints.iterdir()] if checkpoints.is_dir() else []
    except OSError as error:
        raise UserError(f"cannot use the run folder {run_dir}: {error.strerror}") from error
    if resume and run_dir / RUN_FILE in found:
        return
    if all(map(_is_ours, found)) and (resume or all(re.fullmatch(DRAFT, name) for name in saved)):
        return
    if resume:
        saved_run_file(run_dir)
    raise UserError(
        f"{run_dir} is not empty: resume it (--resume {run_dir}, in Python resume=True), or choose "
        "another folder"
    )


def is_draft(path: Path) -> bool:
    """Whether a file in a run folder is one of a run that was killed while it wrote it."""
    draft = re.fullmatch(r"\.(.+)\.[0-9]+\.tmp", path.name)
    return draft is not None and draft[1] in OURS


def _is_ours(path: Path) -> bool:
    """Whether an entry of a run folder has a name that runs give."""
    return path.name in OURS or is_draft(path)


def _read(path: Path) -> dict[str, Any]:
    if path.is_dir():
        saved = path / RUN_FILE
        advice = f"use {saved}, or longspan train --resume {path}" if saved.exists() else "give one"
        raise UserError(f"{path} is a folder, not a run file: {advice}")
    if path.suffix not in (".toml", ".yaml", ".yml"):
        raise UserError(
            f"the run file must end in .toml, .yaml or .yml, got {path}; an override looks like "
            "section.key=value"
        )
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin with a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"cannot read the run file {path}: {reason}") from error
    if path.suffix != ".toml":
        return _parse_yaml(text, path)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error


def _parse_yaml(text: str, path: Path) -> dict[str, Any]:
    import yaml

    try:
        _check_unique_keys(yaml.compose(text, yaml.SafeLoader))
        tables = _as_toml(yaml.safe_load(text))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error
    if tables is None:
        return {}
    if not isinstance(tables, dict):
        raise UserError(f"{path} must contain one table per section, got a {type(tables).__name__}")
    return tables


def _check_unique_keys(node: Any) -> None:
    """Refuse two equal keys in one table, of which YAML would silently use the last."""
    from yaml import MappingNode

    if not isinstance(node, MappingNode):
        return
    keys = [key.value for key, _ in node.value]
    for key, value in node.value:
        if keys.count(key.value) > 1:
            raise ValueError(f"the key {key.value} occurs twice, in line {key.start_mark.line + 1}")
        _check_unique_keys(value)


def _as_toml(value: Any) -> Any:
    """Convert YAML to what TOML gives: string keys, and a float for 3e-4, a string in YAML 1.1."""
    if isinstance(value, dict):
        return {str(key): _as_toml(inner) for key, inner in value.items()}
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        return float(value)
    return value


Keys = tuple[str, ...]


def _parse_override(override: str) -> tuple[Keys, Any]:
    """Return the path of keys and the value of section.key=value."""
    path, equals, text = override.partition("=")
    if path == "layout" and text == AUTO:
        return (path,), text
    if not (equals and re.fullmatch(rf"{KEY}(\.{KEY})+", path)):
        raise UserError(
            f"an override must look like section.key=value, got {toml_value(override)}; "
            "for example train.steps=100"
        )
    return tuple(key.strip('"') for key in re.findall(KEY, path)), _parse_value(text)


def _override(tables: Mapping[str, Any], changes: Mapping[Keys, Any]) -> dict[str, Any]:
    changed = deepcopy(dict(tables))
    for keys, value in changes.items():
        table = changed
        for depth, key in enumerate(keys[:-1], 1):
            table = table.setdefault(key, {})
            if not isinstance(table, dict):
                where = ".".join(keys[:depth])
                raise UserError(
                    f"the override {'.'.join(keys)} needs a table {where}, but {where} is "
                    f"{toml_value(table)}"
                )
        table[keys[-1]] = value
    return changed


def _parse_value(text: str) -> Any:
    """Parse a TOML value; what is not one is a string, so strings need no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _without_wrong_keys(
    section: str,
    table: Any,
    details: list[ErrorDetails],
    replaced: Mapping[tuple[str, str], Any],
) -> Section:
    """Return what a section would be if its wrong keys were left out."""
    wrong = {str(detail["loc"][0]) for detail in details if detail["loc"]}
    kept = {key: value for key, value in table.items() if key not in wrong} if wrong else {}
    back = {key: replaced[section, key] for key in wrong if (section, key) in replaced}
    try:
        return SECTIONS[section].model_validate(kept | back)
    except ValidationError:  # the file's own value is wrong too
        return SECTIONS[section].model_validate(kept)


WORDS = {
    "String should have": "expected a string of",
    "a valid integer": "an integer",
    "a valid number": "a number",
    "a valid string": "a string",
    "a valid boolean": "true or false",
    "a valid tuple": "a list",
    "a valid dictionary": "a table",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "expected greater": "expected a number greater",
    "expected less": "expected a number less",
}
"""Pydantic's words, and those of TOML."""


def _explain(
    key: str,
    detail: ErrorDetails,
    otherwise: Section,
    replaced: Mapping[tuple[str, str], Any],
) -> Problem:
    """Turn a pydantic error into a problem: dotted path, what was expected, what came.

    `otherwise` is the section without its wrong keys.
    """
    loc = [str(part) for part in detail["loc"]]
    path, value = ".".join([key, *loc]), detail["input"]
    if detail["type"] in ("model_type", "model_attributes_type"):
        other = f' or "{AUTO}"' if path == "layout" else ""
        return Problem(path, f"expected a table [{path}]{other}, got {toml_value(value)}")
    applies = "without the override it is" if (key, loc[0]) in replaced else "the default is"
    while len(loc) > 1 and isinstance(inner := getattr(otherwise, loc[0]), Section):
        otherwise, loc = inner, loc[1:]  # a nested table
    fields = type(otherwise).model_fields
    if detail["type"] == "extra_forbidden":
        hint = did_you_mean(loc[0], fields) or f"; it has {', '.join(fields)}"
        return Problem(path, f"unknown key{hint}")
    expected, hint = _expected(detail), ""
    if detail["type"] == "literal_error":
        annotation = fields[loc[0]].annotation
        if get_origin(annotation) is tuple:  # of any number of choices
            annotation = get_args(annotation)[0]
        choices = get_args(annotation)
        *others, last = map(toml_value, choices)
        expected = f"expected {', '.join(others)} or {last}"
        words = [choice for choice in choices if isinstance(choice, str)]
        hint = did_you_mean(value, words, '"{}"') if isinstance(value, str) else ""
    if not hint and isinstance(value, str) and len(loc) == 1:
        hint = _unquoted(type(otherwise), loc[0], value)
    if not hint and len(loc) == 1 and (default := getattr(otherwise, loc[0])) not in (None, (), {}):
        hint = f"; {applies} {toml_value(default)}"
    return Problem(path, f"{expected}, got {toml_value(value)}{hint}")


def _expected(detail: ErrorDetails) -> str:
    text = detail["msg"].replace("Input should be", "expected").partition(", got")[0]
    for theirs, ours in WORDS.items():
        text = text.replace(theirs, ours)
    return text


def _unquoted(section: type[Section], key: str, value: str) -> str:
    """Suggest the number or boolean that a string contains, if the key accepts that."""
    other = _parse_value(value.lower())
    try:
        section.model_validate({key: other})
    except ValidationError:
        return ""
    return f"; did you mean {toml_value(other)}?"


def _suggest(key: str, section: str) -> str:
    """Suggest what an unknown key of `section` was meant to be."""
    if hint := did_you_mean(key, SECTIONS[section].model_fields, f"{section}.{{}}"):
        return hint
    others = _sections_with(key)
    if others:
        return f"; did you mean {others[0]}.{key}?"
    return f"; [{section}] has {', '.join(SECTIONS[section].model_fields)}"


def _suggest_section(name: str) -> str:
    if hint := did_you_mean(name, SECTIONS, "[{}]"):
        return hint
    if sections := _sections_with(name):
        return f"; did you mean {sections[0]}.{name}?"
    return f"; the sections are {', '.join(SECTIONS)}"


def _sections_with(key: str) -> list[str]:
    return [name for name, section in SECTIONS.items() if key in section.model_fields]


def _render(name: str, problems: list[Problem]) -> str:
    unique = list(dict.fromkeys((p.path, p.message) for p in problems))
    width = max(len(path) for path, _ in unique)
    lines = [f"  {path:<{width}}  {message}" for path, message in unique]
    return "\n".join([f"{name}: {counted(len(unique), 'problem')}", *lines])

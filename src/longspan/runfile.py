"""Reads run files: TOML or YAML, dotted overrides, and all problems reported at once."""

from __future__ import annotations

import difflib
import re
import sys
import time
from collections.abc import Iterable, Mapping
from copy import deepcopy
from importlib import resources
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from longspan import presets
from longspan.config import AXES, Model, Run, Section
from longspan.errors import UserError
from longspan.hf_config import LlamaConfig, read_llama_config
from longspan.rules import Problem, check_rules
from longspan.vocabulary import is_folder, rounded_vocab, vocab_of_data

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ONE_PROCESS = [
    *[f"layout.{axis}=1" for axis in AXES],
    "layout.gradient_compression=none",
    "layout.offload=false",
    "engine.name=native",
]
"""Overrides that make any run a run of one process."""

KEY = r'(?:"[^"]*"|[^."=]+)'
"""A key in the path of an override; it is quoted if it contains a dot."""

RUN_FILE = "run.toml"
"""Name of the run file in a run folder."""

SECTIONS: dict[str, type[Section]] = {
    name: field.annotation  # type: ignore[misc]
    for name, field in Run.model_fields.items()
}


def load_run(
    path: Path | None,
    overrides: Iterable[str] = (),
    *,
    builtin: str = "cpu",
    world: int | None = 1,
) -> Run:
    """Load the run file `path`, or the built-in run `builtin`, with section.key=value overrides.

    The layout is checked for `world` processes; None skips that check.
    """
    name = str(path) if path else f"built-in run {builtin!r}"
    tables = _read(path) if path else _read_builtin(builtin)
    overrides = list(overrides)
    given = _override(tables, overrides)
    if path is None and not any(text.startswith("model.vocab=") for text in overrides):
        _drop_builtin_vocab(given)
    return parse_run(given, name, world=world)


def parse_run(tables: Mapping[str, Any], name: str = "run", *, world: int | None = 1) -> Run:
    """Validate plain tables into a Run, or raise one UserError that lists every problem."""
    tables, weights, problems = _fill_from_weights(_fill_branches(dict(tables)))
    tables = _fill_vocab(tables)
    problems += [
        Problem(key, f"unknown section{_did_you_mean(key, SECTIONS)}")
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
            problems += [_explain(key, section, detail) for detail in error.errors()]
    problems += check_rules(sections, world)
    if weights and isinstance(model := sections.get("model"), Model):
        problems += [Problem(path, text) for path, text in weights.disagreements(model).items()]
    if problems:
        raise UserError(_render(name, problems))
    return Run(**sections)  # type: ignore[arg-type]


def dump_run(run: Run) -> str:
    """Return the run as TOML with all defaults written out; unset optional keys are omitted."""
    return tomli_w.dumps(run.model_dump(mode="json", exclude_none=True))


def new_run_dir(parent: Path, run_file: Path | None) -> Path:
    """Return an unused folder name made of the run file's name and the time."""
    stem = f"{run_file.stem if run_file else 'builtin'}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (stem if n == 1 else f"{stem}-{n}" for n in range(1, 1000))
    return next(parent / name for name in names if not (parent / name).exists())


def saved_run_file(run_dir: Path) -> Path:
    """Return the path of the run file in a run folder."""
    path = run_dir / RUN_FILE
    if not path.exists():
        raise UserError(f"{run_dir} is not a run folder: it has no {RUN_FILE}")
    return path


def _fill_branches(tables: dict[str, Any]) -> dict[str, Any]:
    """Give a dilated [attention] without branches those of the model preset."""
    model, attention = tables.get("model", {}), tables.get("attention", {})
    if not isinstance(model, Mapping) or not isinstance(attention, Mapping):
        return tables
    has_branches = {"segment_lengths", "dilation_rates"} & set(attention)
    if attention.get("kind", "dilated") != "dilated" or has_branches:
        return tables
    branches = presets.BRANCHES.get(str(model.get("preset", "tiny")), {})
    return {**tables, "attention": {**branches, **attention}}


def _fill_from_weights(
    tables: dict[str, Any],
) -> tuple[dict[str, Any], LlamaConfig | None, list[Problem]]:
    """Give [model] what it does not set of the model in train.init_from; also return its config.

    A saved run file sets all of it, so a resumed run does not need that folder.
    """
    model, train = tables.get("model", {}), tables.get("train", {})
    if not isinstance(model, Mapping) or not isinstance(train, Mapping):
        return tables, None, []
    folder = train.get("init_from")
    keys = ("rope_theta", "rms_norm_eps", "vocab")
    if not isinstance(folder, str) or not folder or all(key in model for key in keys):
        return tables, None, []
    try:
        config = read_llama_config(Path(folder))
    except UserError as error:
        return tables, None, [Problem("train.init_from", str(error))]
    filled = {**{key: getattr(config, key) for key in keys}, **model}
    return {**tables, "model": filled}, config, []


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


def _drop_builtin_vocab(tables: dict[str, Any]) -> None:
    """Remove the vocabulary of the built-in text from a built-in run with other data or weights."""
    model, data, train = (tables.get(section) for section in ("model", "data", "train"))
    if not (isinstance(model, dict) and isinstance(data, dict) and isinstance(train, dict)):
        return
    if is_folder(data.get("source")) or train.get("init_from"):
        model.pop("vocab", None)


def check_run_folder(run_dir: Path, *, resume: bool) -> None:
    """Refuse a folder that is neither empty nor the run to resume."""
    try:
        if not run_dir.exists() or not any(run_dir.iterdir()):
            return
    except OSError as error:
        raise UserError(f"cannot use the run folder {run_dir}: {error.strerror}") from error
    if not resume:
        raise UserError(
            f"{run_dir} is not empty: continue it with --resume {run_dir}, or choose another folder"
        )
    saved_run_file(run_dir)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"cannot read the run file {path}: {reason}") from error
    if path.suffix in (".yaml", ".yml"):
        return _parse_yaml(text, path)
    if path.suffix != ".toml":
        raise UserError(f"the run file must end in .toml, .yaml or .yml, got {path}")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error


def _read_builtin(builtin: str) -> dict[str, Any]:
    file = resources.files("longspan") / "runs" / f"{builtin}.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def _parse_yaml(text: str, path: Path) -> dict[str, Any]:
    import yaml

    try:
        tables = _as_toml(yaml.safe_load(text))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error
    if tables is None:
        return {}
    if not isinstance(tables, dict):
        raise UserError(f"{path} must contain one table per section, got a {type(tables).__name__}")
    return tables


def _as_toml(value: Any) -> Any:
    """Convert YAML to what TOML gives: string keys, and a float for 3e-4, a string in YAML 1.1."""
    if isinstance(value, dict):
        return {str(key): _as_toml(inner) for key, inner in value.items()}
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        return float(value)
    return value


def _override(tables: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    tables = deepcopy(tables)
    for override in overrides:
        path, equals, text = override.partition("=")
        if not (equals and re.fullmatch(rf"{KEY}(\.{KEY})+", path)):
            raise UserError(
                f"an override must look like section.key=value, got {override!r}; "
                "for example train.steps=100"
            )
        keys = [key.strip('"') for key in re.findall(KEY, path)]
        table = tables
        for depth, key in enumerate(keys[:-1], 1):
            table = table.setdefault(key, {})
            if not isinstance(table, dict):
                where = ".".join(keys[:depth])
                raise UserError(f"{override!r} needs a table {where}, but {where} is {table!r}")
        table[keys[-1]] = _parse_value(text)
    return tables


def _parse_value(text: str) -> Any:
    """Parse a TOML value; what is not one is a string, so strings need no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _explain(key: str, section: type[Section], detail: ErrorDetails) -> Problem:
    """Turn a pydantic error into a problem: dotted path, what was expected, what came."""
    loc = [str(part) for part in detail["loc"]]
    path = ".".join([key, *loc])
    value = detail["input"]
    if detail["type"] in ("model_type", "model_attributes_type"):
        return Problem(path, f"expected a table [{path}], got {value!r}")
    while len(loc) > 1 and isinstance(inner := section.model_fields[loc[0]].default, Section):
        section, loc = type(inner), loc[1:]  # a nested table
    if detail["type"] == "extra_forbidden":
        fields = section.model_fields
        hint = _did_you_mean(loc[0], fields) or f"; it has {', '.join(fields)}"
        return Problem(path, f"unknown key{hint}")
    expected = detail["msg"].replace("Input should be", "expected")
    expected = expected.replace("expected greater", "expected a number greater")
    expected = expected.replace("expected less", "expected a number less")
    hint = ""
    if detail["type"] == "literal_error" and isinstance(value, str):
        choices = str(detail["ctx"]["expected"]).replace(" or ", ", ").split(", ")
        hint = _did_you_mean(value, [choice.strip("'") for choice in choices])
    elif loc and loc[0] in section.model_fields:
        default = section.model_fields[loc[0]].default
        hint = f"; the default is {default!r}" if default not in (None, (), {}) else ""
    return Problem(path, f"{expected}, got {value!r}{hint}")


def _suggest(key: str, section: str) -> str:
    """Suggest what an unknown key of `section` was meant to be."""
    if hint := _did_you_mean(key, SECTIONS[section].model_fields):
        return hint
    others = [name for name, other in SECTIONS.items() if key in other.model_fields]
    if others:
        return f"; did you mean {others[0]}.{key}?"
    return f"; [{section}] has {', '.join(SECTIONS[section].model_fields)}"


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _render(name: str, problems: list[Problem]) -> str:
    unique = list(dict.fromkeys((p.path, p.message) for p in problems))
    width = max(len(path) for path, _ in unique)
    count = "1 problem" if len(unique) == 1 else f"{len(unique)} problems"
    lines = [f"  {path:<{width}}  {message}" for path, message in unique]
    return "\n".join([f"{name}: {count}", *lines])

"""Compares a configuration file of another library with the run file, field by field.

Every field is passed on as it is, says what keys of the run file say and must agree with them, or
is refused with the reason. No field is ignored. A field that is left out, null or "auto" comes from
the run file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from longspan.config import Run
from longspan.errors import UserError
from longspan.wording import counted, did_you_mean

Settings = dict[str, Any]

AUTO = "auto"
"""Hugging Face's value for a setting that is filled in from elsewhere: here the run file."""


@dataclass(frozen=True)
class Honoured:
    """A field that is passed on as it is, or that its launcher has acted on."""


@dataclass(frozen=True)
class Mapped:
    """A field that keys of the run file decide."""

    agrees: bool
    keys: Mapping[str, Any]
    """The keys, and the values they must have for the field's value."""
    problem: str = ""
    """Why no key can have the field's value, and what to change."""


@dataclass(frozen=True)
class Refused:
    """A field, or a table of them, that is accepted only with values that ask for nothing else."""

    reason: str
    """Ends with what to change."""
    accepted: tuple[Any, ...] = (False,)


Field = Honoured | Mapped | Refused
Fields = Mapping[str, Field | Callable[[Any], Field]]
"""What becomes of a field, or of its value, by the field's dotted name."""


def check_agreement(name: str, settings: Settings, fields: Fields, run: Run) -> None:
    """Raise one UserError that lists every field of the file `name` that must change."""
    problems = list(_problems(settings, fields, run))
    if not problems:
        return
    width = max(len(field) for field, _ in problems)
    lines = [f"  {field:<{width}}  {text}" for field, text in problems]
    count = counted(len(problems), "setting")
    title = f'{name} and the run file disagree on {count} ("auto" takes the run file\'s value)'
    raise UserError("\n".join([title, *lines]))


def show(value: Any) -> str:
    """A value as TOML and JSON write it."""
    return json.dumps(value, ensure_ascii=False, default=str)


def _problems(settings: Settings, fields: Fields, run: Run) -> Iterator[tuple[str, str]]:
    wanted: dict[str, tuple[str, Any]] = {}  # by key of the run file: the field, and its value
    for name, value in _leaves(settings, fields):
        if name not in fields:
            hint = did_you_mean(name, fields).removeprefix("; ") or "remove it"
            yield name, f"{show(value)}: unknown setting, which would have no effect; {hint}"
            continue
        found = fields[name]
        field = found(value) if callable(found) else found
        if isinstance(field, Refused) and value not in field.accepted:
            yield name, f"{show(value)}: {field.reason}"
        if not isinstance(field, Mapped):
            continue
        if field.problem:
            yield name, f"{show(value)}: {field.problem}"
            continue
        clashes = (k for k, v in field.keys.items() if k in wanted and wanted[k][1] != v)
        if clash := next(clashes, None):
            other, theirs = wanted[clash]
            yield (
                name,
                f"{show(value)} needs {clash} = {show(field.keys[clash])}, but {other} needs "
                f'{show(theirs)}: change one of them, or set it to "auto"',
            )
            continue
        if wrong := next((k for k, v in field.keys.items() if not _may_be(run, k, v)), None):
            yield name, f"{show(value)}: is not a value that {wrong} can have"
            continue
        wanted |= {key: (name, key_value) for key, key_value in field.keys.items()}
        if not field.agrees:
            yield name, f"{show(value)}, but {_changes(field.keys, run)}"


def _changes(keys: Mapping[str, Any], run: Run) -> str:
    """The run's values of `keys`, and what to set, where they differ."""
    found = {key: _value(run, key) for key in keys}
    different = {key: value for key, value in keys.items() if found[key] != value}
    now = ", ".join(f"{key} is {show(found[key])}" for key in different)
    return f"{now}: set {', '.join(f'{key} = {show(value)}' for key, value in different.items())}"


def _value(run: Run, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(run, section), name)


def _may_be(run: Run, key: str, value: Any) -> bool:
    section, name = key.split(".")
    table = getattr(run, section)
    try:
        type(table).model_validate({**table.model_dump(), name: value})
    except ValidationError:
        return False
    return True


def _leaves(table: Settings, fields: Fields, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted name and value of every field that says something.

    A table that is not enabled has no effect in its library either, whatever else it says.
    """
    for key, value in table.items():
        name = f"{prefix}{key}"
        if value is None or value == AUTO:
            is_table = any(field.startswith(f"{name}.") for field in fields)
            yield from [] if name in fields or is_table else [(name, value)]
            continue
        if not isinstance(value, Mapping):
            yield name, value
        elif name in fields:
            if value and value.get("enabled") is not False:
                yield name, value
        elif (switch := f"{name}.enabled") in fields and not _is_on(fields[switch], value):
            yield from [(switch, False)] if value.get("enabled") is False else []
        else:
            yield from _leaves(dict(value), fields, f"{name}.")


def _is_on(switch: Field | Callable[[Any], Field], table: Mapping[str, Any]) -> bool:
    """Whether a table is enabled, by itself or, if it leaves that to the run file, by the run."""
    if table.get("enabled") != AUTO:
        return bool(table.get("enabled"))
    field = switch(True) if callable(switch) else switch
    return isinstance(field, Mapped) and field.agrees

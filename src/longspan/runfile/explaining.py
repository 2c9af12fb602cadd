"""Explains what is wrong in a run file: dotted path, what was expected, what came."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from longspan.config import AUTO, SECTIONS, RepeatedAttention, Section
from longspan.rules import Problem
from longspan.runfile.reading import parse_value
from longspan.wording import counted, did_you_mean, toml_value


def without_wrong_keys(
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


def explain(
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
    if (key, loc[0]) == ("attention", "layers") and len(loc) > 2:
        otherwise, loc = RepeatedAttention(), loc[2:]  # one of a list of tables
    fields = type(otherwise).model_fields
    if detail["type"] == "missing":
        return Problem(path, "is missing")
    if len(loc) > 2 and (inner_section := _section_in(fields[loc[0]].annotation)):
        fields, loc = inner_section.model_fields, loc[2:]  # of a list of tables
        if detail["type"] != "extra_forbidden":
            return Problem(path, f"{_expected(detail)}, got {toml_value(value)}")
    if detail["type"] == "extra_forbidden":
        hint = did_you_mean(loc[0], fields) or f"; it has {', '.join(fields)}"
        return Problem(path, f"unknown key{hint}")
    expected, hint = _expected(detail), ""
    if detail["type"] == "literal_error":
        annotation = fields[loc[0]].annotation
        if get_origin(annotation) is tuple:  # of any number of choices
            annotation = get_args(annotation)[0]
        if NoneType in get_args(annotation):  # a choice that may be left out
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


def _section_in(annotation: Any) -> type[Section] | None:
    """The section of which a key holds a list, if it does."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(_section_in, get_args(annotation))), None)


def _expected(detail: ErrorDetails) -> str:
    text = detail["msg"].replace("Input should be", "expected").partition(", got")[0]
    for theirs, ours in WORDS.items():
        text = text.replace(theirs, ours)
    return text


def _unquoted(section: type[Section], key: str, value: str) -> str:
    """Suggest the number or boolean that a string contains, if the key accepts that."""
    other = parse_value(value.lower())
    try:
        section.model_validate({key: other})
    except ValidationError:
        return ""
    return f"; did you mean {toml_value(other)}?"


def suggest(key: str, section: str) -> str:
    """Suggest what an unknown key of `section` was meant to be."""
    if hint := did_you_mean(key, SECTIONS[section].model_fields, f"{section}.{{}}"):
        return hint
    others = _sections_with(key)
    if others:
        return f"; did you mean {others[0]}.{key}?"
    return f"; [{section}] has {', '.join(SECTIONS[section].model_fields)}"


def suggest_section(name: str) -> str:
    if hint := did_you_mean(name, SECTIONS, "[{}]"):
        return hint
    if sections := _sections_with(name):
        return f"; did you mean {sections[0]}.{name}?"
    return f"; the sections are {', '.join(SECTIONS)}"


def _sections_with(key: str) -> list[str]:
    return [name for name, section in SECTIONS.items() if key in section.model_fields]


def render(name: str, problems: list[Problem]) -> str:
    unique = list(dict.fromkeys((p.path, p.message) for p in problems))
    width = max(len(path) for path, _ in unique)
    lines = [f"  {path:<{width}}  {message}" for path, message in unique]
    return "\n".join([f"{name}: {counted(len(unique), 'problem')}", *lines])

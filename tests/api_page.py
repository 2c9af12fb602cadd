"""docs/api.md, from the signatures and docstrings of the public names: python -m tests.api_page."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import longspan

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
HEAD = """# The public API

`import longspan` offers these names. Each is imported when it is first used: `import longspan`
itself imports no torch. Everything else in the package may change. `python -m tests.api_page`
writes this page from the docstrings.

Tensors are (batch, tokens, heads, head_dim) unless a line says otherwise. A wrong argument raises
`ValueError`, of which `UserError` is a kind, or `TypeError`, with what was expected, what came and
what to change.

"""
WIDTH = 100


def signature(name: str, value: Any) -> str:
    """The call of a function or class, in lines of its parameters if it is long."""
    if inspect.isclass(value) and issubclass(value, Exception):
        return name
    found, parts, is_keyword = inspect.signature(value), [], False
    for parameter in found.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword:
            parts.append("*")
        is_keyword |= parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        text = "*" * (parameter.kind is parameter.VAR_POSITIONAL) + parameter.name
        has_type = parameter.annotation is not parameter.empty
        text += f": {parameter.annotation}" if has_type else ""
        has_default = parameter.default is not parameter.empty
        parts.append(text + (f" = {parameter.default!r}" if has_default else ""))
    result = "" if inspect.isclass(value) else f" -> {found.return_annotation}"
    line = f"{name}({', '.join(parts)}){result}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){result}"])


def docstring(value: Any) -> str:
    text = inspect.cleandoc(value.__doc__ or "")
    assert text, f"{value} has no docstring"
    return text


def entry(name: str, value: Any) -> str:
    """The section of one name: signature, docstring, and for a class those it inherits from."""
    parts = [f"## {name}", f"```text\n{signature(name, value)}\n```", docstring(value)]
    if inspect.isclass(value):
        bases = [x for x in value.__mro__[1:] if x.__module__.startswith("longspan.")]
        parts += [docstring(base) for base in bases if base.__name__ != "Pattern"]
        for method in ("forward", "attend"):
            if function := getattr(value, method, None):
                parts += [f"```text\n{signature(f'{name}.{method}', function)}\n```"]
                parts += [docstring(function)]
    return "\n\n".join(parts)


def render() -> str:
    """The whole page."""
    values = {name: getattr(longspan, name) for name in longspan.PUBLIC}
    table = ["| name | what it is |", "| --- | --- |"]
    for name, value in values.items():
        first = docstring(value).split("\n\n")[0].replace("\n", " ")
        table.append(f"| [`{name}`](#{name.lower()}) | {first.replace('|', chr(92) + '|')} |")
    entries = [entry(name, value) for name, value in values.items()]
    return HEAD + "\n\n".join(["\n".join(table), *entries]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")

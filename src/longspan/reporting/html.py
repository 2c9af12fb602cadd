"""HTML that is escaped by construction: text becomes markup only through `tag`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from html import escape
from typing import Any

VOID = {"meta", "input", "br"}


class Html(str):
    """Markup that `tag` built, or a part of the page that this package wrote."""


Child = str | int | float | None | Iterable["Child"]
"""What a tag may contain; None is left out."""


def tag(name: str, *children: Child, **attributes: str | int | float | bool | None) -> Html:
    """An element. Text is escaped; a trailing or inner _ in a name of an attribute becomes -.

    True gives an attribute without a value; False and None leave it out.
    """
    parts = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        name_of = key.rstrip("_").replace("_", "-")
        parts.append(f" {name_of}" if value is True else f' {name_of}="{_clean(str(value))}"')
    opening = f"<{name}{''.join(parts)}>"
    return Html(opening if name in VOID else f"{opening}{join(children)}</{name}>")


def join(children: Iterable[Child]) -> Html:
    """The markup of several children, one after the other."""
    found = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, Html):
            found.append(str(child))
        elif isinstance(child, str | int | float):
            found.append(_clean(str(child)))
        else:
            found.append(join(child))
    return Html("".join(found))


NOT_SHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that HTML cannot hold, or that change the direction of what follows them."""


def _clean(text: str) -> str:
    """Escape text, with � for the characters that are not shown."""
    return escape(NOT_SHOWN.sub("�", text))


def script_json(value: Any) -> Html:
    """JSON that stays inside a script element, whatever its strings contain."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # ASCII: no U+2028
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Html(text)


def table(heads: Iterable[Child], rows: Iterable[Iterable[Child]], class_: str = "") -> Html:
    """A table that scrolls sideways where the page is narrow. Numbers are aligned to the right."""
    head = tag("tr", [tag("th", cell, scope="col") for cell in heads])
    body = [
        tag(
            "tr",
            [
                tag("td", cell, class_="number" if isinstance(cell, int | float) else None)
                for cell in row
            ],
        )
        for row in rows
    ]
    found = tag("table", tag("thead", head), tag("tbody", body), class_=class_ or None)
    return tag("div", found, class_="scroll", tabindex=0)

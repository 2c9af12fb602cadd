"""Pictures of a pattern's mask: rows are queries, columns are keys."""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.attention.mask import check_pattern
from longspan.attention.pattern import Pattern

_SHADES = "·▒█"  # seen in no, one, several branches
_COLOURS = ("#9db8d9", "#4a7ab5", "#1f3f70")
_CELL = 6


def _counts(pattern: Pattern, tokens: int, head: int, is_causal: bool) -> Tensor:
    check_pattern(pattern)
    position = torch.arange(tokens)
    counts = pattern.counts(position, position, head)
    return counts.tril() if is_causal else counts


def picture(pattern: Pattern, tokens: int, *, head: int = 0, is_causal: bool = True) -> str:
    """The mask of one head as text, one character per pair: · unseen, ▒ seen once, █ more often."""
    rows = _counts(pattern, tokens, head, is_causal).clamp(max=2).tolist()
    return "\n".join("".join(_SHADES[count] for count in row) for row in rows)


def picture_svg(pattern: Pattern, tokens: int, *, head: int = 0, is_causal: bool = True) -> str:
    """The mask of one head as an SVG image, darker where a key is seen more often."""
    counts = _counts(pattern, tokens, head, is_causal)
    side = tokens * _CELL
    cells = [
        f'<rect x="{k * _CELL}" y="{q * _CELL}" width="{_CELL}" height="{_CELL}" '
        f'fill="{_COLOURS[min(int(counts[q, k]), len(_COLOURS)) - 1]}"/>'
        for q, k in counts.nonzero().tolist()
    ]
    head_tag = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {side} {side}" width="{side}">'
    )
    return "\n".join([head_tag, f"<title>{pattern}, head {head}</title>", *cells, "</svg>\n"])

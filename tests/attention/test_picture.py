"""Pictures show the mask of the pattern."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import torch

from longspan.attention import BlockSparse, Dilated, picture, picture_svg


def test_text_shows_segments_dilation_and_overlap() -> None:
    # Branch 4/1 keeps everything in its segment; branch 8/2 adds even keys for even queries.
    assert picture(Dilated((4, 8), (1, 2)), 8).splitlines() == [
        "█·······",
        "▒▒······",
        "█▒█·····",
        "▒▒▒▒····",
        "▒·▒·█···",
        "····▒▒··",
        "▒·▒·█▒█·",
        "····▒▒▒▒",
    ]
    assert picture(Dilated((2,), (2,)), 2, head=1).splitlines() == ["··", "·▒"]


def test_svg_has_a_cell_for_every_pair_that_is_seen() -> None:
    pattern = BlockSparse(4, local_window=8, density=0.2)
    drawn = picture_svg(pattern, 16, is_causal=False)
    root = ElementTree.fromstring(drawn)
    cells = {(int(r.get("y", 0)) // 6, int(r.get("x", 0)) // 6) for r in root if r.get("x")}
    position = torch.arange(16)
    seen = pattern.counts(position, position, 0).nonzero().tolist()
    assert cells == {(q, k) for q, k in seen}
    assert re.search("<title>BlockSparse", drawn)

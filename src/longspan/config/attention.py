"""The section [attention]."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from longspan.config.section import Integers, NonNegative, Positive, Section

DILATED = ("dilated", "dilated_block_sparse")
"""The kinds of attention with dilated branches."""
BLOCK_SPARSE = ("block_sparse", "dilated_block_sparse")
"""The kinds of attention with blocks."""
DILATED_KEYS = ("segment_lengths", "dilation_rates")
WINDOW_KEYS = ("window", "sinks", "window_dilation")
BLOCK_SPARSE_KEYS = ("local_window", "global_tokens", "stride", "density", "block_seed")


class Attention(Section):
    kind: Literal["dense", "dilated", "block_sparse", "dilated_block_sparse", "window"] = "dilated"
    """Attention pattern, which decides which keys a query attends to; "dilated_block_sparse" is
    dilated, and block-sparse among the positions that a branch keeps of a segment; "window" is a
    sliding window that is exact to the token."""
    segment_lengths: Integers = ()
    """Tokens per segment of each dilated branch; by default they grow from 2,048 (preset "tiny":
    256) to the context."""
    dilation_rates: Integers = ()
    """Dilation rate of each branch, which attends to every n-th position of its segment; by default
    1, 4, 16 and 32, as many as the context needs."""
    block_size: Positive = 128
    """Tokens per block of a block-sparse pattern, which always keeps the blocks on the diagonal."""
    local_window: NonNegative = 0
    """Sliding window in tokens: how far a block attends back and ahead, its own block included;
    a multiple of `block_size`."""
    global_tokens: NonNegative = 0
    """Number of first tokens that attend to all tokens and that all tokens attend to; a multiple of
    `block_size`."""
    stride: NonNegative = 0
    """Keeps every n-th block, counted from the diagonal; 0 keeps none of them."""
    density: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Fraction of all blocks that is also kept at random, drawn with `block_seed`."""
    block_seed: NonNegative = 0
    """Seed for the random blocks of `density`."""
    window: NonNegative = 0
    """Number of tokens that a query of kind "window" attends to, itself included."""
    sinks: NonNegative = 0
    """Number of first tokens that all queries of kind "window" also attend to (attention sinks)."""
    window_dilation: NonNegative = 0
    """Distance between the tokens of a window; 0 and 1 are a window without gaps."""

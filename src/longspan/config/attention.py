"""The section [attention]."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle, islice
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from longspan.config.section import Integers, Layers, NonNegative, Positive, Section

DILATED = ("dilated", "dilated_block_sparse")
"""The kinds of attention with dilated branches."""
BLOCK_SPARSE = ("block_sparse", "dilated_block_sparse")
"""The kinds of attention with blocks."""
DILATED_KEYS = ("segment_lengths", "dilation_rates")
WINDOW_KEYS = ("window", "sinks", "window_dilation")
BLOCK_SPARSE_KEYS = ("local_window", "global_tokens", "stride", "density", "block_seed")


class LayerAttention(Section):
    """The attention pattern of a layer."""

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


def attention_keys(kind: str) -> tuple[str, ...]:
    """Return the keys that have an effect on a kind of attention."""
    return (
        *(DILATED_KEYS if kind in DILATED else ()),
        *(("block_size", *BLOCK_SPARSE_KEYS) if kind in BLOCK_SPARSE else ()),
        *(WINDOW_KEYS if kind == "window" else ()),
    )


def attention_settings(attention: LayerAttention) -> tuple[Any, ...]:
    """Return what distinguishes the pattern of a layer from others."""
    return attention.kind, *(getattr(attention, key) for key in attention_keys(attention.kind))


class RepeatedAttention(LayerAttention):
    """A table of `attention.layers`."""

    repeat: Layers = 1
    """Number of consecutive layers with this pattern."""


class Attention(LayerAttention):
    layers: Annotated[tuple[RepeatedAttention, ...], Field(strict=False)] = ()
    """Patterns that the layers have in turn, from the first layer on and again from the beginning
    after the last pattern, in tables [[attention.layers]]; by default all layers have that of
    [attention]. A table has the keys of [attention] and `repeat`; keys that it does not set are
    those of [attention]."""

    @model_validator(mode="before")
    @classmethod
    def _fill_layers(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or not isinstance(given.get("layers"), list | tuple):
            return given
        filled = []
        for layer in given["layers"]:
            if isinstance(layer, Mapping):
                kind = layer.get("kind", given.get("kind", "dilated"))
                keys = attention_keys(kind) if isinstance(kind, str) else ()
                inherited = {key: given[key] for key in keys if key in given}
                layer = {"kind": kind, **inherited, **layer}
            filled.append(layer)
        return {**given, "layers": filled}

    @property
    def cycle(self) -> tuple[LayerAttention, ...]:
        """The patterns of the first layers, which those after them repeat."""
        repeated = (layer for layer in self.layers for _ in range(layer.repeat))
        return tuple(repeated) or (self,)

    def settings(self, layers: int) -> list[tuple[Any, ...]]:
        """Return what distinguishes the patterns of so many layers from others."""
        return [attention_settings(x) for x in islice(cycle(self.cycle), layers)]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of attention that some layer has."""
        return tuple(dict.fromkeys(layer.kind for layer in self.layers or (self,)))

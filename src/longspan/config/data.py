"""The section [data]."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from longspan.config.section import Positive, Section


class MixedSource(Section):
    """A table [[data.mix]]."""

    source: Annotated[str, Field(min_length=1)]
    """"builtin", or a folder written by `longspan data build`."""
    weight: Annotated[float, Field(ge=0)] = 1.0
    """Its part of the samples is this over the sum of all weights; 0 leaves it out."""


class Data(Section):
    source: Annotated[str, Field(min_length=1)] = "builtin"
    """Training text: "builtin" (the source of the Python standard library), "recall" (a synthetic
    task), or a folder written by `longspan data build`."""
    mix: Annotated[tuple[MixedSource, ...], Field(strict=False)] | None = None
    """Several sources in place of `source`, each a table [[data.mix]] with `source` and `weight`:
    the shares of samples are those of the weights, exactly."""
    context: Positive = 4096
    """Context length, the number of tokens per sample."""
    documents: Literal["isolate", "join"] = "isolate"
    """"isolate": attention, positions and losses stay within a document, and documents are packed
    into windows whole where they fit; "join": they are concatenated, and attention crosses
    their boundaries. A sample of "recall" is one document in either way."""
    recall_pairs: Positive = 16
    """Number of key-value pairs in each sequence of the "recall" source."""
    accept_changed: bool = False
    """Lets a run resume on data other than its checkpoint was trained on."""
    verify: bool = True
    """Verifies the SHA-256 of every token shard at the start; shards that have not changed since
    the last time are not read again."""

    @property
    def isolates(self) -> bool:
        """Whether attention stays within documents, of which a sample may have several."""
        return self.documents == "isolate" and (self.mix is not None or self.source != "recall")

    @property
    def sources(self) -> tuple[str, ...]:
        """All sources: those of the mixture, or `source`."""
        return (self.source,) if self.mix is None else tuple(part.source for part in self.mix)

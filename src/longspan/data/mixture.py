"""A mixture: samples of several sources in fixed shares, in an order that needs no state.

The sources are the leaves of a binary tree. Of the first n samples that reach a node whose left
half has the share p, exactly ⌊np⌋ go to the left: sample n is among them if ⌊(n + 1)p⌋ > ⌊np⌋, as
number ⌊np⌋ of those, and otherwise number n - ⌊np⌋ of the right half. So a sample's source and its
index there follow from its index in the mixture alone, and after any number of samples each source
has had its share to within one sample for each level of the tree.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from longspan.data.samples import Baseline, Sample, bigram_nats
from longspan.data.source import BASELINE_TOKENS, Source, TokenSource
from longspan.data.tokenizer import JsonTokenizer, Tokenizer
from longspan.data.verification import Verification, VerificationGroup
from longspan.errors import UserError


@dataclass(frozen=True)
class Part:
    """A source of a mixture."""

    name: str
    weight: Fraction
    source: TokenSource


class MixtureSource(Source):
    """Mixes sources by weights, exact and stateless."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        first = parts[0].source
        self.tokenizer, self.context = first.tokenizer, first.context
        self.vocab = max(part.source.vocab for part in parts)
        for part in parts[1:]:
            if _identity(part.source.tokenizer) != _identity(first.tokenizer):
                raise UserError(
                    f"the sources of data.mix need one tokenizer, but {parts[0].name} and "
                    f"{part.name} have different ones: build both with the same --tokenizer"
                )
        scale = math.lcm(*(part.weight.denominator for part in parts))
        self._sums = [0, *accumulate(int(part.weight * scale) for part in parts)]
        texts = [f"{part.weight} {part.source.fingerprint}" for part in parts]
        self.fingerprint = hashlib.sha256("\n".join(texts).encode()).hexdigest()

    def describe(self) -> str:
        shares = [f"{self._share(part):.2%} {part.name}" for part in self.parts]
        details = [f"{part.name}: {part.source.describe()}" for part in self.parts]
        return f"mixture of {', '.join(shares)}; {'; '.join(details)}"

    def verification(self) -> Verification | None:
        found = [part.source.verification() for part in self.parts]
        return VerificationGroup([each for each in found if each is not None])

    def locate(self, index: int) -> tuple[int, int]:
        """The number of the source of sample `index`, and the sample's index there."""
        first, stop = 0, len(self.parts)
        while stop - first > 1:
            middle = (first + stop) // 2
            before = self._of_left(index, first, middle, stop)
            if self._of_left(index + 1, first, middle, stop) > before:
                index, stop = before, middle
            else:
                index, first = index - before, middle
        return first, index

    def samples_by_source(self, count: int) -> dict[str, int]:
        """How many of the first `count` samples are from each source."""
        return {part.name: n for part, n in zip(self.parts, self._counts(count), strict=True)}

    def sample(self, seed: int, index: int) -> Sample:
        number, inner = self.locate(index)
        return self.parts[number].source.sample(seed, inner)

    def num_targets(self, seed: int, index: int) -> int:
        number, inner = self.locate(index)
        return self.parts[number].source.num_targets(seed, inner)

    def validation_samples(self, count: int) -> list[Sample]:
        """In the same shares, as far as the sources have so many."""
        pools = [
            part.source.validation_samples(n)
            for part, n in zip(self.parts, self._counts(count), strict=True)
        ]
        places = (self.locate(index) for index in range(count))
        return [pools[number][inner] for number, inner in places if inner < len(pools[number])]

    def baseline(self, samples: list[Sample]) -> Baseline:
        fitted = [
            stretch
            for part in self.parts
            for stretch in part.source.stretches(int(BASELINE_TOKENS * self._share(part)))
        ]
        tokens = sum(len(sample.tokens) for sample in fitted)
        name = f"bigram (fitted on {tokens:,} training tokens)"
        return Baseline(name, bigram_nats(fitted, samples, self.vocab))

    def _counts(self, count: int) -> list[int]:
        def split(first: int, stop: int, count: int) -> list[int]:
            if stop - first == 1:
                return [count]
            middle = (first + stop) // 2
            left = self._of_left(count, first, middle, stop)
            return [*split(first, middle, left), *split(middle, stop, count - left)]

        return split(0, len(self.parts), count)

    def _of_left(self, count: int, first: int, middle: int, stop: int) -> int:
        """How many of the first `count` samples of sources first…stop are of those to middle."""
        sums = self._sums
        return count * (sums[middle] - sums[first]) // (sums[stop] - sums[first])

    def _share(self, part: Part) -> float:
        return float(part.weight / sum(other.weight for other in self.parts))


def _identity(tokenizer: Tokenizer | None) -> str:
    return tokenizer.sha256 if isinstance(tokenizer, JsonTokenizer) else "bytes"

"""What linear layers store and compute. Plain numbers: imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


def rank_for(in_features: int, out_features: int, keep: float) -> int:
    """The largest rank at which a layer stores at most `keep` of a dense layer's numbers.

    From 256 on a multiple of 8, so that rows of 16-bit factors begin at multiples of 16 bytes, as
    the fast matrix products of GPUs want them.
    """
    whole = in_features * out_features / (in_features + out_features)
    rank = int(keep * whole + 1e-9)  # 0.58 · 50 is a little less than 29 in floating point
    return rank if rank < 256 else rank - rank % 8


@dataclass(frozen=True)
class Cost:
    """What a linear layer takes, its bias left out."""

    stored: int
    """Numbers that are trained, and stand in a checkpoint."""
    forward: int
    """FLOPs per token."""
    backward: int
    """FLOPs per token, for the gradients of the input and of what is trained."""

    @staticmethod
    def dense(in_features: int, out_features: int) -> Cost:
        size = in_features * out_features
        return Cost(size, 2 * size, 4 * size)

    @staticmethod
    def low_rank(in_features: int, out_features: int, rank: int) -> Cost:
        size = rank * (in_features + out_features)
        return Cost(size, 2 * size, 4 * size)

    @staticmethod
    def sketched(in_features: int, out_features: int, rank: int) -> Cost:
        """`rank`: of all terms together. Fixed factors are multiplied by but get no gradient."""
        size = rank * (in_features + out_features)
        return Cost(size, 4 * size, 6 * size)

    def excess_over(self, other: Cost) -> list[str]:
        """In what it exceeds `other`, with the numbers."""
        figures = [
            ("stores", self.stored, other.stored, "numbers"),
            ("computes", self.forward, other.forward, "FLOPs per token forward"),
            (
                "computes",
                self.forward + self.backward,
                other.forward + other.backward,
                "FLOPs per token in training",
            ),
        ]
        return [
            f"{verb} {own:,} {what} where nn.Linear has {its:,}"
            for verb, own, its, what in figures
            if own > its
        ]

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.stored + other.stored,
            self.forward + other.forward,
            self.backward + other.backward,
        )

"""An MLP of sketched layers, which have 29% of the parameters of dense ones.

    longspan train examples/sketched.toml          # also --nproc 2, layout.shard=2, ...
    longspan train examples/sketched.toml --nproc 2 layout.pipeline=2

It learns the classes that a random dense network gives to random vectors. The signs of a sketched
layer follow from its seed and are the same on every rank: only what is trained is communicated.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import longspan

WIDTHS, CLASSES = [256, 256, 128], 10


class Vectors(torch.utils.data.Dataset):
    """Random vectors (WIDTHS[0],), each with the class that a fixed random network gives it."""

    def __init__(self, start: int, stop: int) -> None:
        generator = torch.Generator().manual_seed(0)
        first = torch.randn(WIDTHS[0], 16, generator=generator)
        second = torch.randn(16, CLASSES, generator=generator)
        self.x = torch.randn(stop, WIDTHS[0], generator=generator)[start:]
        self.labels = (torch.relu(self.x @ first) @ second).argmax(dim=1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.labels[index]


def mlp() -> nn.Sequential:
    layers: list[nn.Module] = []
    for seed, (before, after) in enumerate(pairwise(WIDTHS)):
        # Each has R (before + after) parameters, R = 32, where a dense one has before · after.
        layers += [longspan.SKLinear(before, after, sketch_size=32, seed=seed), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTHS[-1], CLASSES))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """The cross-entropy, and the number of vectors."""
    x, labels = batch
    return F.cross_entropy(model(x), labels, reduction="sum"), len(labels)


def task(run: longspan.Run) -> longspan.Task:
    return longspan.Task(
        mlp(),
        loss,
        Vectors(0, 8192),
        validation=Vectors(8192, 8448),
        wrap=longspan.SKLinear,
        stages=[["0", "1"], ["2", "3", "4"]],  # the names that nn.Sequential gives its modules
    )

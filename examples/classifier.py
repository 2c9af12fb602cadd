"""A vision transformer with dilated attention tells circles, squares and crosses apart.

    longspan train examples/classifier.toml        # also --nproc 2, layout.shard=2, ...

The training loss is the cross-entropy; the validation loss is the error rate: 0 is perfect, and a
guess has 0.67.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import longspan

SIZE, PATCH, CLASSES = 16, 2, 3
TOKENS = (SIZE // PATCH) ** 2


class Shapes(torch.utils.data.Dataset):
    """Noisy images (1, SIZE, SIZE), each with its class. Random numbers depend on the index."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x, y = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="xy")
        center, radius = torch.randint(4, SIZE - 4, (2,)), torch.randint(2, 5, ())
        dx, dy = (x - center[0]).abs(), (y - center[1]).abs()
        shapes = [dx**2 + dy**2 <= radius**2, (dx <= radius) & (dy <= radius), (dx < 2) | (dy < 2)]
        label = int(torch.randint(CLASSES, ()))
        return shapes[label].float()[None] + 0.1 * torch.randn(1, SIZE, SIZE), label


class Block(nn.Module):
    """Attention within segments of 16 patches, and of every fourth patch of the image; an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = longspan.MultiheadDilatedAttention(width, 4, [16, TOKENS], [1, 4])
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[0](x)
        x = x + self.attention(h, h, h)[0]
        return x + self.mlp(self.norms[1](x))


class Classifier(nn.Module):
    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, PATCH, stride=PATCH)
        self.positions = nn.Parameter(0.02 * torch.randn(TOKENS, width))
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (batch, CLASSES) of images (batch, 1, SIZE, SIZE)."""
        x = self.patches(images).flatten(2).mT + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(dim=1)))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """The cross-entropy, or in evaluation the number of errors; and the number of images."""
    images, labels = batch
    logits = model(images)
    if not model.training:
        return (logits.argmax(dim=-1) != labels).float().sum(), len(labels)
    return F.cross_entropy(logits, labels, reduction="sum"), len(labels)


def task(run: longspan.Run) -> longspan.Task:
    return longspan.Task(Classifier(), loss, Shapes(4096), validation=Shapes(256), wrap=Block)

"""A diffusion U-Net, trained by Longspan: any model, any loss, any dataset.

    longspan train examples/unet.toml --run-dir shapes      # also --nproc 2, layout.shard=2, ...
    python examples/unet.py shapes samples.png              # a grid of samples

The dataset draws circles, squares and crosses; give a folder of images instead with
`UNET_IMAGES=folder` (it needs Pillow). The model learns to predict the noise that was added to an
image; samples come from its exponential moving average (EMA), which is kept in the optimizer's
state and so in every checkpoint.
"""

from __future__ import annotations

import math
import os
import struct
import sys
import zlib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import longspan

SIZE, LEVELS, EMA = 16, 100, 0.99
# The share of the image that is left after each level of noise (a cosine schedule).
SIGNAL = torch.cos(torch.linspace(0, 1, LEVELS + 1)[1:] * math.pi / 2 * 0.98) ** 2


class Shapes(torch.utils.data.Dataset):
    """Images (1, SIZE, SIZE) in -1..1 with noise. Random numbers depend on the sample's index."""

    def __init__(self, count: int) -> None:
        folder = os.environ.get("UNET_IMAGES")
        self.files = sorted(Path(folder).glob("*.png")) if folder else []
        self.count = len(self.files) or count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        image = self.read(self.files[index]) if self.files else self.draw()
        level = torch.randint(LEVELS, ())
        return {"image": image, "noise": torch.randn(image.shape), "level": level}

    def draw(self) -> Tensor:
        x, y = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="xy")
        center, radius = torch.randint(4, SIZE - 4, (2,)), torch.randint(2, 5, ())
        dx, dy = (x - center[0]).abs(), (y - center[1]).abs()
        shapes = [dx**2 + dy**2 <= radius**2, (dx <= radius) & (dy <= radius), (dx < 2) | (dy < 2)]
        return shapes[torch.randint(3, ())].float()[None] * 2 - 1

    def read(self, file: Path) -> Tensor:
        from PIL import Image

        pixels = Image.open(file).convert("L").resize((SIZE, SIZE))
        return torch.tensor(list(pixels.getdata())).view(1, SIZE, SIZE) / 127.5 - 1


class Block(nn.Module):
    """Two convolutions with the noise level in between, and a residual."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(4, before), nn.GroupNorm(4, after)])
        self.first = nn.Conv2d(before, after, 3, padding=1)
        self.second = nn.Conv2d(after, after, 3, padding=1)
        self.level = nn.Linear(32, after)
        self.shortcut = nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        h = self.first(F.silu(self.norms[0](x))) + self.level(level)[:, :, None, None]
        return self.shortcut(x) + self.second(F.silu(self.norms[1](h)))


class UNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.levels = nn.Embedding(LEVELS, 32)
        self.down = nn.ModuleList([Block(width, width), Block(width, 2 * width)])
        self.middle = Block(2 * width, 2 * width)
        self.up = nn.ModuleList([Block(4 * width, width), Block(2 * width, width)])
        self.head = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        """The noise in images x (batch, 1, size, size) at levels (batch,)."""
        level, x, skips = self.levels(level), self.stem(x), []
        for block in self.down:
            x = block(x, level)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x, level)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, skips.pop()], dim=1), level)
        return self.head(x)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """The squared error of the predicted noise, summed over pixels, and the number of pixels."""
    signal = SIGNAL.to(batch["level"].device)[batch["level"]][:, None, None, None]
    noisy = signal.sqrt() * batch["image"] + (1 - signal).sqrt() * batch["noise"]
    error = model(noisy, batch["level"]) - batch["noise"]
    return error.square().sum(), error.numel()


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, and after each of its steps the EMA of the weights, as one more state of each."""
    adamw = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)

    @torch.no_grad()
    def update(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for parameter, state in optimizer.state.items():
            if "ema" not in state:
                state["ema"] = parameter.detach().clone()
            state["ema"].lerp_(parameter.detach(), 1 - EMA)

    adamw.register_step_post_hook(update)
    return adamw


def task(run: longspan.Run) -> longspan.Task:
    own = optimizer if run.engine.name == "native" else None  # other engines bring their own way
    data, validation = Shapes(4096), Shapes(64)
    return longspan.Task(UNet(), loss, data, validation=validation, wrap=Block, optimizer=own)


@torch.no_grad()
def sample(model: nn.Module, count: int) -> Tensor:
    """Images (count, 1, size, size) from noise, level by level (DDIM)."""
    x = torch.randn(count, 1, SIZE, SIZE)
    for level in reversed(range(LEVELS)):
        noise = model(x, torch.full((count,), level))
        signal, after = SIGNAL[level], SIGNAL[level - 1] if level else torch.tensor(1.0)
        clean = ((x - (1 - signal).sqrt() * noise) / signal.sqrt()).clamp(-1, 1)
        noise = (x - signal.sqrt() * clean) / (1 - signal).sqrt()
        x = after.sqrt() * clean + (1 - after).sqrt() * noise
    return x


def save_grid(images: Tensor, path: str, rows: int = 4) -> None:
    """Write images (count, 1, size, size) as one grayscale PNG, each pixel six wide."""
    grid = torch.cat([torch.cat(list(row), dim=2) for row in images.chunk(rows)], dim=1)[0]
    pixels = ((grid.clamp(-1, 1) + 1) * 127.5).byte().repeat_interleave(6, 0)
    lines = b"".join(b"\0" + bytes(row.tolist()) for row in pixels.repeat_interleave(6, 1))
    height, width = len(pixels), 6 * pixels.shape[1]

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
    Path(path).write_bytes(b"\x89PNG\r\n\x1a\n" + header + body)


def draw_samples(run_dir: str, picture: str) -> None:
    """Write samples of the EMA of a run's weights."""
    model = UNet()
    model.load_state_dict(longspan.load_weights(run_dir, "ema"))
    torch.manual_seed(0)
    save_grid(sample(model, 32), picture)


if __name__ == "__main__":
    draw_samples(*sys.argv[1:])

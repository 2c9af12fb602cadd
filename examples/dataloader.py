"""A DataLoader and a training set of your own, handed to Longspan as they are.

    python examples/dataloader.py
    torchrun --standalone --nproc-per-node 2 examples/dataloader.py
    python examples/dataloader.py --resume

Of the DataLoader the dataset, collate_fn, batch size, num_workers and shuffle are taken. No
DistributedSampler is needed: a step has the same samples on any number of processes.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import longspan


def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    """The squared error, summed, and the number of samples."""
    x, y = batch
    return (model(x) - y).square().sum(), len(x)


def trainer(run_dir: str, **options: object) -> longspan.Trainer:
    torch.manual_seed(0)
    x = torch.randn(1024, 8)
    y = x.sin().sum(dim=1, keepdim=True)
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1))
    run = {
        "train": {"steps": 500, "micro_batch": 16, "global_batch": 64, "lr": 1e-2} | options,
        "checkpoint": {"every": 100},
    }
    return longspan.Trainer(model, loss, loader, run=run, run_dir=run_dir)


if __name__ == "__main__":
    trainer("runs/dataloader").train(resume="--resume" in sys.argv)

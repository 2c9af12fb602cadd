"""A world without other processes: torch's "fake" backend, whose collectives return at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from longspan.torch_internals import clear_sharding_cache, fake_store


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """Make this process rank `rank` of `size`; what it receives is undefined."""
    assert not dist.is_initialized(), "a process has one default process group"
    dist.init_process_group("fake", rank=rank, world_size=size, store=fake_store())
    try:
        yield
    finally:
        dist.destroy_process_group()
        clear_sharding_cache()

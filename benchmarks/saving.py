"""How long training waits for a checkpoint: written behind it, and at once.

python benchmarks/saving.py [GiB [DEVICE]]      # 1 and cpu unless given
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from longspan.checkpoint import Part
from longspan.config import Checkpoint, Layout
from longspan.parallel.placement import Placement
from longspan.parallel.world import World
from longspan.training.saving import Saver

TENSORS = 64
REPEATS = 5


def main() -> None:
    gib = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    device = sys.argv[2] if len(sys.argv) > 2 else "cpu"
    rows = int(gib * 2**30 / TENSORS / 4 / 1024)
    tensors = [torch.randn(rows, 1024, device=device) for _ in range(TENSORS)]
    parts = {f"model/{i}": Part.whole(tensor) for i, tensor in enumerate(tensors)}
    state: Any = SimpleNamespace(
        step=0, parts=lambda: parts, scalars=lambda _: {}, is_finite=lambda: True
    )
    folder = Path(tempfile.mkdtemp(prefix="longspan-saving-", dir="."))
    try:
        for behind in (False, True):
            settings = Checkpoint(async_save=behind, keep=1)
            saver = Saver(folder, settings, Placement(Layout(), World(), None), print)
            blocked, whole = [], []
            for _ in range(REPEATS):
                state.step += 1
                begin, waited = time.monotonic(), saver.blocked_s
                saver.begin(state, {})
                blocked.append(saver.blocked_s - waited)
                saver.finish_all()
                whole.append(time.monotonic() - begin)
            name = "behind" if behind else "at once"
            first, *others = blocked
            print(
                f"{name:<8} {gib:g} GiB: training waits {sorted(others)[len(others) // 2]:.3f} s "
                f"(the first time {first:.3f} s), written after {sorted(whole)[REPEATS // 2]:.2f} s"
            )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()

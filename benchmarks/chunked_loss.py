"""Peak memory and time of the chunked cross-entropy against the plain one, over sequence length.

    python benchmarks/chunked_loss.py [--json FILE] [--lengths 1024 2048 …] [--vocab 50304]

"extra" is the peak while the loss and its gradients are computed, less what any method must hold:
the inputs and their gradients. On CUDA it is the allocator's peak; on CPU the largest sum of live
tensor storages seen after any operator, a count and not a sample.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from longspan.nn import cross_entropy_sum

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy((hidden @ weight.T).float(), targets, reduction="sum")


class LiveBytes(TorchDispatchMode):
    """Adds up the storages that operators make and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self._count(tensor)
        return out

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address in self._seen or size == 0:
            return
        self._seen.add(address)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, address, size)

    def _free(self, address: int, size: int) -> None:
        self._seen.discard(address)
        self.now -= size


def measure(loss: Loss, tokens: int, width: int, vocab: int, device: str) -> dict[str, float]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, width, device=device, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocab, (tokens,), device=device)
    gradients = sum(x.numel() * x.element_size() for x in (hidden, weight))

    def step() -> None:
        hidden.grad = weight.grad = None
        loss(hidden, weight, targets).backward()

    if device == "cuda":
        step()
        hidden.grad = weight.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        peak = torch.cuda.max_memory_allocated() - before
    else:
        with LiveBytes() as live:
            step()
        peak = live.peak
    times = []
    for _ in range(3):
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return {"extra_bytes": peak - gradients, "seconds": statistics.median(times)}


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    lengths = [8192, 16384, 32768, 65536, 131072] if device == "cuda" else [1024, 2048, 4096, 8192]
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths)
    parser.add_argument("--width", type=int, default=768 if device == "cuda" else 64)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    title = f"cross-entropy, width {args.width}, vocabulary {args.vocab:,}, {name}"
    table = Table("tokens", "method", "extra MiB", "ms", title=title)
    rows = []
    for tokens in args.lengths:
        for method, loss in (("chunked", cross_entropy_sum), ("plain", plain)):
            found = measure(loss, tokens, args.width, args.vocab, device)
            rows.append({"tokens": tokens, "method": method, **found})
            extra, ms = found["extra_bytes"] / 2**20, found["seconds"] * 1e3
            table.add_row(f"{tokens:,}", method, f"{extra:,.0f}", f"{ms:,.1f}")
    Console(file=sys.stdout).print(table)
    if args.json:
        args.json.write_text(json.dumps({"device": name, "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()

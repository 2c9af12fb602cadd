"""`longspan bench loss`: the chunked cross-entropy against plain logits, over sequence length.

"extra" is the peak memory while the loss and its gradients are computed, less the inputs and their
gradients, which any method needs. On CUDA it is the allocator's peak; on CPU the peak sum of live
tensor storages after any operator. Times are medians of three forward and backward passes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from longspan.benchmarks.measure import Rows, machine, open_console, write_json
from longspan.errors import UserError
from longspan.nn import cross_entropy_sum
from longspan.planning.tracing import LiveMemory
from longspan.progress import measuring

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Setting:
    device: str
    lengths: tuple[int, ...]
    width: int
    vocab: int = 50304

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32


GPU = Setting("cuda", (8192, 16384, 32768, 65536, 131072), width=768)
CPU = Setting("cpu", (1024, 2048, 4096, 8192), width=64)


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy((hidden @ weight.T).float(), targets, reduction="sum")


METHODS: dict[str, Loss] = {"chunked": cross_entropy_sum, "plain": plain}


def bench_loss(setting: Setting, json_file: Path | None) -> None:
    """Measure, print a table and write JSON."""
    if min(*setting.lengths, setting.width, setting.vocab) < 1:
        raise UserError("--lengths, --width and --vocab must be at least 1")
    console, where = open_console(json_file), machine(setting.device)
    console.print(
        f"{where}; cross-entropy in {setting.dtype}, width {setting.width}, "
        f"vocabulary {setting.vocab:,}"
    )
    table, rows = Rows(console, {"tokens": 9, "method": -8, "extra MiB": 9, "ms": 10}), []
    for tokens in setting.lengths:
        for method, loss in METHODS.items():
            with measuring(f"measuring: {method}, {tokens:,} tokens"):
                extra_bytes, seconds = _measure(loss, tokens, setting)
            row = {"tokens": tokens, "method": method}
            rows.append({**row, "extra_bytes": extra_bytes, "seconds": seconds})
            extra, ms = f"{extra_bytes / 2**20:,.0f}", f"{seconds * 1e3:,.1f}"
            table.add(f"{tokens:,}", method, extra, ms)
    write_json(json_file, where, asdict(setting) | {"dtype": str(setting.dtype)}, rows)


def _measure(loss: Loss, tokens: int, setting: Setting) -> tuple[int, float]:
    """Extra bytes at the peak, and the median seconds of a step."""
    device, dtype, width, vocab = setting.device, setting.dtype, setting.width, setting.vocab
    hidden = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, width, device=device, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocab, (tokens,), device=device)

    def step() -> None:
        hidden.grad = weight.grad = None
        loss(hidden, weight, targets).backward()  # type: ignore[no-untyped-call]

    if device == "cuda":
        step()
        hidden.grad = weight.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        peak = torch.cuda.max_memory_allocated() - before
    else:
        with LiveMemory() as live:
            step()
        peak = live.peak
    times = []
    for _ in range(3):
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return peak - hidden.nbytes - weight.nbytes, statistics.median(times)

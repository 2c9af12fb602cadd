"""What `train.parameter_precision` asks of the other keys."""

from __future__ import annotations

from longspan.config import Engine, Layout, Model, Train
from longspan.rules.problem import Problem, Problems


def parameter_precision_rules(
    train: Train, model: Model, engine: Engine, layout: Layout, world: int
) -> Problems:
    if train.parameter_precision == "fp32":
        return
    is_chunked = train.chunk_tokens > 0 or train.has_auto_chunks
    refused = {
        f'needs train.precision = "bf16", but it is "{train.precision}"': train.precision
        in ("fp32", "fp16"),
        'needs train.optimizer = "adamw8bit", which can round its updates stochastically, but it '
        f'is "{train.optimizer}"': train.optimizer != "adamw8bit",
        f'needs engine.name = "native", but it is "{engine.name}"': engine.name != "native",
        f"needs one process, since each would round its own way, but there are {world}": world > 1,
        "is not supported with layout.offload = true": layout.offload,
        f"needs one micro-batch per step, since bf16 gradients would lose bits in their sum, but "
        f"train.global_batch = {train.global_batch} is more than train.micro_batch = "
        f"{train.micro_batch}": train.global_batch > train.micro_batch,
        "is not supported with train.chunk_tokens, whose chunks sum gradients": is_chunked,
        "is not supported with train.fp8 = true": train.fp8,
        "is not supported with train.halve_on_oom = true, which would sum bf16 gradients of more "
        "micro-batches": train.halve_on_oom,
        "is not supported with model.lora": model.lora.rank > 0,
        f'needs model.linear = "dense", but it is "{model.linear}"': model.linear != "dense",
    }
    for message, holds in refused.items():
        if holds:
            yield Problem("train.parameter_precision", f'"bf16" {message}: use "fp32"')

"""The initial weights of the decoder: of (seed, name) alone, whatever the device and the layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor, nn

from longspan.config import Model, Run
from longspan.costs import linear_sizes
from longspan.errors import UserError
from longspan.models.decoder import Decoder, new_decoder
from longspan.sketching.layers import low_rank_std, seed_of, sketched_std
from longspan.torch_internals import has_dispatch_mode

DRAWN_TOGETHER = 8
"""Initial values that threads draw at a time: two minutes of a core for eight billion."""


def build_decoder(run: Run, device: torch.device) -> Decoder:
    """The run's model on `device`, initialised from `train.seed`."""
    model = new_decoder(run)
    allocate(model, device)
    initialize(model, run.train.seed, model.named_parameters())
    return model


@torch.no_grad()
def initialize(
    model: Decoder,
    seed: int,
    parameters: Iterable[tuple[str, nn.Parameter]],
    distribute: Callable[[Tensor, Tensor], Tensor] = lambda full, _: full,
) -> None:
    """Initialise `parameters`, by their names in one process.

    `distribute(full, parameter)` gives the shard of a full initial value that a rank holds.
    """
    waiting = list(parameters)
    together = 1 if has_dispatch_mode() else DRAWN_TOGETHER  # a mode is that of one thread
    with ThreadPoolExecutor(together) as pool:  # one thread draws a random stream
        draw = map if together == 1 else pool.map
        while waiting:
            drawn, waiting = waiting[:together], waiting[together:]
            shapes = {name: parameter.shape for name, parameter in drawn}
            full = draw(partial(initial_weight, model.config, seed), shapes, shapes.values())
            for (_, parameter), value in zip(drawn, full, strict=True):
                parameter.copy_(distribute(value, parameter))


def allocate(model: nn.Module, device: torch.device) -> None:
    """Allocate the parameters of a model on the meta device, uninitialised."""
    try:
        model.to_empty(device=device)
    except RuntimeError as error:
        count = sum(p.numel() for p in model.parameters())
        raise UserError(
            f"out of memory: {count:,} parameters do not fit on {device}: {error}"
        ) from error


def round_matrices(model: nn.Module) -> None:
    """Make the matrices of a model bf16, with which it must be called under autocast.

    Vectors stay as they are: norms, biases and sinks are few, and the residual stream is float32.
    """
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data = parameter.data.to(torch.bfloat16)


def initial_weight(model: Model, seed: int, name: str, shape: torch.Size) -> Tensor:
    """The initial value of a parameter, from its own random stream of (seed, name).

    It depends on no device and no other parameter, and so on no layout. By default normal with std
    √(2/(5·hidden)) ("SmallInit", Nguyen & Salazar 2019), divided by √(2·layers) for projections
    into the residual stream. MAGNETO (Wang et al. 2022): Xavier, with gain √(ln 2·layers) on value,
    out and MLP projections. Sketched and low-rank layers get factors with which their outputs have
    the variance of a dense layer's.
    """
    *_, module, kind = name.split(".")
    if kind in ("bias", "sinks", "lora_b"):
        return torch.zeros(shape)
    if len(shape) == 1:  # norms
        return torch.full(shape, 1 - model.norm_offset)
    if kind == "lora_a":
        std = 1 / math.sqrt(shape[1])
    elif model.sub_layer_norm and module not in ("embedding", "head"):
        gain = 1.0 if module in ("query", "key") else math.sqrt(math.log(2 * model.layers))
        layer = name.split(".", 2)[2].rsplit(".", 1)[0]  # of blocks.3.mlp.up.weight: mlp.up
        std = gain * math.sqrt(2 / sum(linear_sizes(model)[layer]))
    else:
        std = math.sqrt(2 / (5 * model.hidden))
        if module in ("out", "down"):
            std /= math.sqrt(2 * model.layers)
    if kind in ("s1", "s2") and model.linear == "low_rank":
        std = low_rank_std(std, shape[1] if kind == "s1" else shape[0])
    elif kind in ("s1", "s2"):
        std = sketched_std(std, model.sketch.terms)
    stream = torch.Generator().manual_seed(seed_of(seed, name))
    return torch.randn(shape, generator=stream) * std

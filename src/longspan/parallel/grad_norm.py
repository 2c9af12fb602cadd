"""The global gradient norm of a model whose parameters are spread over ranks."""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longspan.parallel.dtensor import num_shards, reduced_grad
from longspan.parallel.mesh import ParallelMesh
from longspan.parallel.parameters import pipeline_copy
from longspan.torch_internals import foreach_mul_, sum_of_squares


@torch.no_grad()
def clip_grad_norm(
    model: nn.Module,
    mesh: ParallelMesh,
    max_norm: float,
    device: torch.device,
    loss_scale: float | Tensor = 1.0,
) -> Tensor:
    """Scale gradients so that their norm over all ranks is at most `max_norm`.

    Returns the norm before clipping, on `device`, the one that computes: gradients may be offloaded
    to CPU. A gradient that several ranks hold counts once. Gradients of a loss that was multiplied
    by `loss_scale` are divided by it first.
    """
    ranks = mesh.world.size / mesh.ranks["pipeline"]
    by_copies: dict[float, list[Tensor]] = defaultdict(list)
    gradients, copy = [], pipeline_copy(model)
    for parameter in model.parameters():
        gradient = reduced_grad(parameter)
        if gradient is None:
            continue
        if isinstance(loss_scale, Tensor):
            gradient.div_(loss_scale.to(gradient.device))
        elif loss_scale != 1.0:
            gradient.div_(loss_scale)
        gradients.append(gradient)
        if parameter is not copy:
            assert parameter.grad is not None
            by_copies[ranks / num_shards(parameter.grad)].append(gradient)
    total = torch.zeros((), device=device)
    for copies, held in by_copies.items():
        total += sum_of_squares(held).to(device) / copies
    if mesh.device_mesh is not None:
        dist.all_reduce(total)
    norm = total.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if gradients:
        factor = factor.to(gradients[0].device)
        foreach_mul_(gradients, factor)
    return norm

"""The global gradient norm of a model whose parameters are spread over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longspan.parallel.dtensor import num_shards, reduced_grad
from longspan.parallel.mesh import ParallelMesh
from longspan.parallel.parameters import pipeline_copy


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
    squares, gradients, copy = [], [], pipeline_copy(model)
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
            copies = ranks / num_shards(parameter.grad)
            squares.append(gradient.float().square().sum() / copies)
    total = torch.stack(squares).sum().to(device) if squares else torch.zeros((), device=device)
    if mesh.device_mesh is not None:
        dist.all_reduce(total)
    norm = total.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if gradients:
        factor = factor.to(gradients[0].device)
    for gradient in gradients:
        gradient.mul_(factor)
    return norm

"""Norms of gradients and parameters by layer, of a model that is spread over ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longspan.parallel.dtensor import num_shards, reduced_grad, to_local
from longspan.parallel.mesh import ParallelMesh
from longspan.parallel.parameters import named_parameters, pipeline_copy


def layer_of(name: str) -> str:
    """The layer that a parameter belongs to, as its norms are reported.

    Its name up to the first number ("blocks.3", "model.layers.3"); without one, up to its second
    component, and without the parameter's own ("embedding", "model.embed_tokens").
    """
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
    if number is not None:
        return ".".join(parts[: number + 1])
    return ".".join(parts[:-1][:2]) or name


class NormsByLayer:
    """The norms of each layer of a model, the same on all ranks."""

    def __init__(self, names: Iterable[str], mesh: ParallelMesh, device: torch.device) -> None:
        """`names`: of the parameters of the whole model; a pipeline stage holds some of them."""
        self.layers = list(dict.fromkeys(map(layer_of, names)))
        self._index = {layer: index for index, layer in enumerate(self.layers)}
        self._mesh, self._device = mesh, device
        self._shares: Tensor | None = None

    @torch.no_grad()
    def measure_gradients(self, model: nn.Module) -> None:
        """Note how the gradient norm is spread over layers, before gradients are clipped.

        Only shares, as gradients are still multiplied by the loss scale and a user's own divisor.
        """
        gradients = []
        for name, parameter, copies in self._parameters(model):
            gradient = reduced_grad(parameter)
            if gradient is not None:
                assert parameter.grad is not None
                gradients.append((name, gradient, copies / num_shards(parameter.grad)))
        squares = self._squares(gradients)
        self._shares = (squares / squares.sum()).sqrt()

    def gradients(self, norm: Tensor) -> dict[str, float]:
        """The norms of the last gradients measured, whose norm over all layers is `norm`."""
        shares, self._shares = self._shares, None
        return {} if shares is None else self._named(shares * norm.to(shares.device))

    @torch.no_grad()
    def parameters(self, model: nn.Module) -> dict[str, float]:
        return self._named(
            self._squares(
                (name, to_local(parameter), copies / num_shards(parameter))
                for name, parameter, copies in self._parameters(model)
            ).sqrt()
        )

    def _parameters(self, model: nn.Module) -> Iterable[tuple[str, nn.Parameter, float]]:
        """Parameters by name, and the number of ranks that hold one which is not sharded."""
        ranks = self._mesh.world.size / self._mesh.ranks["pipeline"]
        copy = pipeline_copy(model)
        for name, parameter in named_parameters(model):
            if parameter is not copy:
                yield name, parameter, ranks

    def _squares(self, tensors: Iterable[tuple[str, Tensor, float]]) -> Tensor:
        """(layers,): sums of squares over all ranks; each tensor is held by so many ranks."""
        by_layer: dict[int, list[Tensor]] = {}
        for name, x, copies in tensors:
            by_layer.setdefault(self._index[layer_of(name)], []).append(
                x.float().square().sum().to(self._device) / copies
            )
        total = torch.zeros(len(self.layers), device=self._device)
        for index, squares in by_layer.items():
            total[index] = torch.stack(squares).sum()
        if self._mesh.device_mesh is not None:
            dist.all_reduce(total)
        return total

    def _named(self, norms: Tensor) -> dict[str, float]:
        return dict(zip(self.layers, norms.tolist(), strict=True))

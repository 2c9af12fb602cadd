"""Linear layers that multiply in fp8 while they train (torchao, which this module imports).

Of y = x Wᵀ and of both its gradients, each factor is divided by a scale, rounded to 8 bits and
multiplied on units that are twice as fast as those for 16 bits; sums are not in 8 bits. x and W are
rounded to e4m3 (3 bits of mantissa), the gradient of y to e5m2 (2 bits, a larger range). A factor
has one scale, from its largest magnitude at that moment ("tensorwise", "dynamic"), which is a power
of two: what a number is rounded to then hardly depends on the others, so neither on the layout nor
on later tokens. Only numbers that are some 2^14 times smaller than the largest lose bits by it.

Parameters, their names and their gradients are those of `nn.Linear`.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn.functional import linear
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

from longspan.nn.precision import autocast_dtype


class FP8Linear(Float8Linear):  # type: ignore[misc]
    """A linear layer in fp8; in eval mode it computes what `nn.Linear` does."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., in) to (..., out)."""
        if not self.training:
            return linear(x, self.weight, self.bias)
        dtype = autocast_dtype(x) or x.dtype
        # In 16 bits, as FSDP gathers it: a layout must not change what it is rounded to.
        weight = self.weight.to(dtype)
        y: Tensor = matmul_with_hp_or_float8_args.apply(
            x.to(dtype), weight.t(), self.linear_mm_config, self.config
        )
        return y if self.bias is None else y + self.bias.to(dtype)


def convert_to_fp8(modules: Iterable[nn.Module], *, pads: bool = False) -> None:
    """Replace the linear layers in `modules` by those in fp8, with the same parameters.

    `pads`: whether x may have a number of rows that is no multiple of 16, as the gradient of W
    needs it.
    """
    config = Float8LinearConfig(pad_inner_dim=pads, round_scales_to_power_of_2=True)
    for module in modules:
        convert_to_float8_training(
            module, module_filter_fn=lambda layer, _: type(layer) is nn.Linear, config=config
        )
        for layer in module.modules():
            if type(layer) is Float8Linear:
                layer.__class__ = FP8Linear

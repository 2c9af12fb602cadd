"""DeepSpeed: ZeRO 0 to 3, with optimizer state and parameters offloaded where the run file says.

The loss is ours, the sum over all tokens of a step; so are the optimizer (PyTorch's fused AdamW),
its groups and its learning rate. DeepSpeed averages gradients over the ranks, as DDP does, clips
them and calls the optimizer; between the two it is asked whether the step is to be taken.

What a rank holds of a parameter is a stretch of its flattened values: with ZeRO-3 an equal share of
each, with ZeRO-1 and 2 what of it falls into an equal share of all. Checkpoints hold it as boxes,
and no rank ever makes a whole copy.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longspan.attention import KVCache, pattern_of
from longspan.checkpoint import Box, Part
from longspan.config import Run
from longspan.data import Sample, batch_of
from longspan.engines.optimizer import build_optimizer
from longspan.engines.protocol import Judge, Read, Reader
from longspan.engines.scaling import LossScale
from longspan.engines.settings import Settings, deepspeed_settings
from longspan.errors import UserError
from longspan.models import Decoder, build_decoder, parameter_shapes
from longspan.models.decoder import initial_weight
from longspan.nn import logits_of
from longspan.parallel.activation_checkpointing import rematerialised
from longspan.parallel.pipeline import Around
from longspan.parallel.placement import Placement

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Held:
    """A parameter of which this rank holds `count` values, from `start` of them all.

    What DeepSpeed keeps beside a parameter are attributes of it that no type knows.
    """

    name: str
    parameter: Any
    start: int
    count: int
    group: int
    """Of those that are updated together…"""
    place: int
    """…and where in its flat tensor the values begin."""


class DeepSpeed:
    """`around`: the context of a forward pass in training."""

    def __init__(
        self, run: Run, placed: Placement, device: torch.device, around: Around = nullcontext
    ) -> None:
        settings = deepspeed_settings(run, placed.world.size)
        self._deepspeed = _import(device)
        self._run, self._placed, self._device, self._around = run, placed, device, around
        self._stage: int = settings["zero_optimization"]["stage"]
        self._shapes = parameter_shapes(run)
        for key in ("optimizer", "scheduler"):  # ours
            settings.pop(key, None)
        if self._stage == 0:  # which would clip and not tell the norm
            settings["gradient_clipping"] = 0.0
        _join(placed, device)
        self._deepspeed.init_distributed(verbose=False)
        self.model = self._build(settings)
        for index, block in enumerate(self.model.blocks):
            if run.train.compile is True:
                block.compile(fullgraph=True)
            self.model.blocks[index] = rematerialised(block, run.train)
        self.optimizer = build_optimizer(self.model, run.train)
        self.optimizer.register_step_pre_hook(self._before_update)
        self._engine = self._initialize(settings)
        self._zero = self._engine.optimizer
        self.module: nn.Module = self._engine
        self._scale = LossScale(enabled=run.train.precision == "fp16")
        if self._scale.enabled:  # ours, and none of its own: those do not unscale what they clip
            self._engine.torch_autocast_z0_gradscaler = None
            self._zero.torch_autocast_gradscaler = None
        self._judge: Judge | None = None
        self._norm: Tensor | None = None
        if self._stage == 3:
            self.load_weights(self._drawn)

    def _build(self, settings: Settings) -> Decoder:
        run = self._run
        if self._stage < 3:
            return build_decoder(run, self._device)
        with self._deepspeed.zero.Init(config_dict_or_path=settings):  # module by module
            return Decoder(run.model, pattern_of(run.attention), run.data.context)

    def _initialize(self, settings: Settings) -> Any:
        engine, *_ = self._deepspeed.initialize(
            model=self.model, optimizer=self.optimizer, config=settings, dist_init_required=False
        )
        return engine

    def _drawn(self, name: str, box: Box) -> Tensor:
        """A part of an initial weight."""
        shape = self._shapes[name]
        whole = initial_weight(self._run.model, self._run.train.seed, name, torch.Size(shape))
        return whole[box.slices_of(Box.whole(shape))]

    @property
    def reader(self) -> Reader:
        return _Gathering(self.model, self._deepspeed) if self._stage == 3 else self.model

    def backward(self, samples: list[Sample], scale: Tensor) -> Tensor:
        total, size = torch.zeros((), device=self._device), self._run.train.micro_batch
        factor = self._scale.factor
        if self._stage > 0 and self._scale.enabled:  # it scales losses and unscales gradients
            self._zero.override_loss_scale(factor)
            factor = 1.0
        for start in range(0, len(samples), size):
            batch = batch_of(samples[start : start + size], self._device)
            self._engine.set_gradient_accumulation_boundary(start + size >= len(samples))
            with self._around():
                loss = self._engine(batch.tokens, batch.targets) * scale
            # `scale` is of the whole step, not of a micro-batch.
            self._engine.backward(loss * factor, scale_wrt_gas=False)
            total += loss.detach()
        return total

    def step(self, judge: Judge) -> Tensor:
        self._judge, self._norm = judge, None
        if self._stage == 0:
            for parameter in self.model.parameters() if self._scale.enabled else ():
                if parameter.grad is not None:
                    parameter.grad /= self._scale.factor
            clip = self._run.train.grad_clip or math.inf
            self._decide(self._placed.clip_gradients(self.model, clip))
        self._engine.step()
        if self._norm is None:  # DeepSpeed skips steps whose gradients are no numbers itself
            self._decide(torch.tensor(math.inf, device=self._device))
        assert self._norm is not None
        if self._scale.enabled:
            self._scale.update(overflows=not math.isfinite(self._norm))
        return self._norm

    def _before_update(self, *_: object) -> None:
        """Called by the optimizer, which DeepSpeed calls for one group after another."""
        if self._norm is None:
            self._decide(torch.as_tensor(self._zero._global_grad_norm, device=self._device))

    def _decide(self, norm: Tensor) -> None:
        assert self._judge is not None
        self._norm = norm.float()
        is_bad = self._judge(self._norm, overflows=self._scale.enabled)
        if self._scale.enabled:
            is_bad = torch.maximum(is_bad, (~self._norm.isfinite()).float())
        self.optimizer.found_inf = is_bad  # type: ignore[attr-defined]

    def is_finite(self) -> bool:
        return all(bool(self._values(held).isfinite().all()) for held in self._each())

    def parts(self) -> dict[str, Part]:
        own: dict[str, Part] = {}
        states = self.optimizer.state
        keys = [None, *(MOMENTS if states else ())]
        for held in self._each() if self._stage or self._placed.world.is_main else ():
            for key in keys:
                name = f"model/{held.name}" if key is None else f"optimizer/{held.name}.{key}"
                values = self._values(held, key)
                if self._is_swapped(held.group):
                    values = values.clone()
                own |= self._boxed(name, held, values)
        if states and self._placed.world.is_main:
            step = Part.whole(next(iter(states.values()))["step"])
            own |= {f"optimizer/{name}.step": step for name in self._shapes}
        return own

    def _boxed(self, name: str, held: Held, values: Tensor) -> dict[str, Part]:
        shape = self._shapes[held.name]
        found, at = {}, 0
        for number, box in enumerate(Box.of_stretch(held.start, held.start + held.count, shape)):
            count = math.prod(box.shape)
            part = values[at : at + count].view(box.shape)
            found[f"{name}#{number}" if number else name] = Part(part, shape, box)
            at += count
        return found

    @torch.no_grad()
    def load_weights(self, read: Read) -> None:
        for held in self._each(changes=True):
            self._values(held).copy_(self._read(held, held.name, read))
        if self._stage in (1, 2):
            self._zero.update_lp_params()
        if self._stage == 3:
            for group in range(len(self._flats())):
                with self._swapped_in(group, changes=False):
                    self._zero._reassign_or_swap_out_partitioned_parameters(group)
            if whole := self._zero.persistent_parameters:
                whole[0].partition(whole)
                whole[0].all_gather(whole)

    @torch.no_grad()
    def load_moments(self, found: Iterable[tuple[str, str, bool]], read: Read) -> None:
        kept = {(name, key) for name, key, _ in found}
        if not kept:
            return
        step = read(f"{next(iter(self._shapes))}.step", Box.whole(()))
        for group, flat in enumerate(self._flats()):
            state = self.optimizer.state[flat]
            if not state:
                with self._swapped_in(group, changes=True):
                    state |= {key: torch.zeros_like(flat) for key in MOMENTS}
            state["step"] = step.to(flat.device, copy=True)
        for held in self._each(changes=True):
            for key in MOMENTS:
                if (held.name, key) in kept:
                    self._values(held, key).copy_(self._read(held, f"{held.name}.{key}", read))

    def _read(self, held: Held, name: str, read: Read) -> Tensor:
        boxes = Box.of_stretch(held.start, held.start + held.count, self._shapes[held.name])
        return torch.cat([read(name, box).flatten() for box in boxes])

    def scaler_state(self) -> dict[str, float]:
        return self._scale.state()

    def load_scaler_state(self, state: dict[str, float]) -> None:
        self._scale.load(state)

    def _flats(self) -> list[Tensor]:
        """What the optimizer updates."""
        if self._stage == 0:
            return list(self.model.parameters())
        if self._stage == 3:
            return list(self._zero.fp32_partitioned_groups_flat)
        return list(self._zero.single_partition_of_fp32_groups)

    def _held(self) -> Iterator[Held]:
        parameter: Any
        for name, parameter in self._placed.named_parameters(self.model):
            start, count, group, place = 0, math.prod(self._shapes[name]), 0, 0
            if self._stage == 3:
                share = parameter.ds_tensor.ds_numel  # the last one's is filled up
                start = self._placed.world.rank * share
                count = max(0, min(share, count - start))
                group, place, _ = self._zero.grad_position[self._zero.get_param_id(parameter)]
            elif self._stage > 0:
                here = parameter._hp_mapping
                if here is None:
                    continue
                start, count = here.lp_fragment_address.start, here.lp_fragment_address.numel
                group, place = here.param_group_index, here.hp_fragment_address.start
            if count:
                yield Held(name, parameter, start, count, group, place)

    def _each(self, *, changes: bool = False) -> Iterator[Held]:
        """All of them, each with its values in memory until the next is asked for."""
        groups: dict[int, list[Held]] = {}
        for held in self._held():
            groups.setdefault(held.group, []).append(held)
        for group, members in groups.items():
            with self._swapped_in(group, changes=changes):
                yield from members

    def _values(self, held: Held, key: str | None = None) -> Tensor:
        """This rank's values of a parameter in 32 bits, or of one of its moments."""
        flat = held.parameter if self._stage == 0 else self._flats()[held.group]
        values: Tensor = flat if key is None else self.optimizer.state[flat][key]
        return values.detach().flatten().narrow(0, held.place, held.count)

    def _is_swapped(self, group: int) -> bool:
        """Whether ZeRO-3 keeps a group of parameters and their moments on a disk."""
        return self._stage == 3 and bool(self._zero._swappable_optimizer_subgroup(group))

    @contextmanager
    def _swapped_in(self, group: int, *, changes: bool) -> Iterator[None]:
        """Around what reads, or `changes`, a group. (DeepSpeed's own setters refuse such.)"""
        if self._is_swapped(group):
            self._zero._optimizer_states_and_gradient_swap_in(group)
        try:
            yield
        finally:
            if self._is_swapped(group) and changes:
                self._zero._optimizer_states_and_gradient_swap_out(group)
            elif self._is_swapped(group):
                self._zero._release_swap_buffers(group)


class _Gathering:
    """A model whose parameters ZeRO-3 gathers where a module is called; its head is not."""

    def __init__(self, model: Decoder, deepspeed: Any) -> None:
        self._model, self._deepspeed = model, deepspeed

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self._model(tokens, targets)
        return loss

    def new_caches(self) -> list[KVCache]:
        return self._model.new_caches()

    def next_logits(self, tokens: Tensor, caches: list[KVCache]) -> Tensor:
        last = self._model.hidden(tokens, caches)[:, -1]
        with self._deepspeed.zero.GatheredParameters([self._model.head_weight]):
            return logits_of(last, self._model.head_weight)


def _import(device: torch.device) -> Any:
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    try:
        import deepspeed
    except ImportError as error:
        raise UserError(
            'engine.name = "deepspeed" needs DeepSpeed: pip install "longspan[deepspeed]"'
        ) from error
    deepspeed.utils.logger.setLevel("WARNING")
    for handler in deepspeed.utils.logger.handlers:  # the output is the run's own
        handler.setStream(sys.stderr)
    # It calls collectives by names that PyTorch is giving up, and says so at every step.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    # For inference alone; it would be compiled at the start of every first run.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _join(placed: Placement, device: torch.device) -> None:
    """DeepSpeed reads the environment, and wants a process group even for one process."""
    world = placed.world
    for name, value in (
        ("RANK", world.rank),
        ("WORLD_SIZE", world.size),
        ("LOCAL_RANK", world.local_rank),
    ):
        os.environ.setdefault(name, str(value))
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)

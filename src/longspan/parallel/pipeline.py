"""Pipeline parallel: each rank holds some of the layers, and micro-batches flow through the ranks.

The layers fall into stages, one per rank, or two and more ("interleaved", "zbv"). The schedules are
those of torch.distributed.pipelining; here stand the parts they run, what a tied embedding needs,
and a way through all stages without gradients, for evaluation and sampling. How layers are dealt
out is in `stages.py`.

A tied embedding is needed by the first stage and by the last. Each holds it, and both add the
other's gradient to their own: the copies stay equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor

from longspan.attention import KVCache
from longspan.config import Run
from longspan.models import Decoder
from longspan.models.decoder import SelfAttention, positions_of
from longspan.nn import cross_entropy_sum, logits_of, rope_table
from longspan.parallel.pipeline_schedule import (
    Action,
    bubble,
    simple_order,
    split_layers,
    stages_of,
)

SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
}
Around = Callable[[], AbstractContextManager[object]]


class Stage(nn.Module):
    """Some blocks of a decoder, after its embedding or before its head where they are at its ends.

    Its modules are the decoder's own.
    """

    def __init__(
        self, model: Decoder, layers: range, *, is_first: bool, is_last: bool, around: Around
    ) -> None:
        super().__init__()
        self.embedding = model.embedding if is_first else None
        self.blocks = nn.ModuleList(model.blocks[layer] for layer in layers)
        self.norm = model.norm if is_last else None
        self.head = model.head if is_last else None
        self.head_dim, self.rope_theta = model.head_dim, model.rope_theta
        self.positions, self.around = model.positions, around

    def forward(
        self, x: Tensor, targets: Tensor | None = None, caches: list[KVCache] | None = None
    ) -> Tensor:
        """Tokens (batch, tokens), or what the stage before returned, to (batch, tokens, hidden).

        The last stage returns the summed cross-entropy against `targets` (1,) or, without them,
        the logits (batch, vocab) after the last token.
        """
        count = x.shape[1] if targets is None else targets.shape[1]
        positions = positions_of(count, x.device, self.positions, caches)
        rope = rope_table(positions, self.head_dim, self.rope_theta)
        with self.around():
            if self.embedding is not None:
                x = self.embedding(x)
            for index, block in enumerate(self.blocks):
                x = block(x, rope, caches[index] if caches else None)
            if self.norm is None or self.head is None:
                return x
            x = self.norm(x)
            if targets is None:
                return logits_of(x[:, -1], self.head.weight)
            return torch.stack([cross_entropy_sum(x, self.head.weight, targets)])


def keep_own_layers(model: Decoder, run: Run, mesh: DeviceMesh) -> None:
    """Take from `model` (on the meta device) all that other ranks of `mesh` hold.

    The names of what remains do not change, except that the copy of a tied embedding which the
    last stage keeps is called its head.
    """
    own = stages_of(run.layout, mesh.size())[mesh.get_local_rank()]
    layers, _ = split_layers(run, run.layout.stages_per_rank * mesh.size())
    last = len(layers) - 1
    if model.head is None and last in own:
        model.head = nn.Linear(run.model.hidden, run.model.vocab, bias=False, device="meta")
    kept = {layer for i in own for layer in layers[i]}
    for layer in range(run.model.layers):
        if layer not in kept:
            model.blocks[layer] = nn.Identity()
    if 0 not in own:
        del model.embedding
    if last not in own:
        del model.norm
        model.head = None


class Pipelined(nn.Module):
    """A decoder whose stages lie on the ranks of the one-dimensional `mesh`."""

    def __init__(self, model: Decoder, run: Run, mesh: DeviceMesh, around: Around) -> None:
        """`model`: with what `keep_own_layers` has left of it; `around`: of a forward pass."""
        super().__init__()
        own = stages_of(run.layout, mesh.size())[mesh.get_local_rank()]
        layers, self._costs = split_layers(run, run.layout.stages_per_rank * mesh.size())
        last = len(layers) - 1
        self._own = {
            i: Stage(model, layers[i], is_first=i == 0, is_last=i == last, around=around)
            for i in own
        }
        self.stages = nn.ModuleList(self._own.values())
        self._run, self._mesh = run, mesh
        self._group = mesh.get_group()
        self._owners = {
            stage: rank
            for rank, of_rank in enumerate(stages_of(run.layout, mesh.size()))
            for stage in of_rank
        }
        self._scale = torch.ones(())
        self._token_parts = self._micro_batches = 1
        self._features = run.model.hidden
        self._schedule: Any = None

    @property
    def _last(self) -> int:
        return len(self._costs) - 1

    def set_up(
        self,
        micro_batches: int,
        tokens: int,
        *,
        token_parts: int,
        feature_parts: int,
        device: torch.device,
    ) -> None:
        """Make the schedule, once the stages are where they belong.

        `tokens`: of a sample that this rank has; `token_parts`, `feature_parts`: into how many
        parts these are split between blocks.
        """
        self._token_parts, self._micro_batches = token_parts, micro_batches
        run, rows = self._run, self._run.train.micro_batch
        self._features = run.model.hidden // feature_parts
        shape = (rows, tokens // token_parts, self._features)
        # The residual stream, float32 under autocast too.
        between = torch.empty(shape, device="meta", requires_grad=True)
        ids = torch.empty(rows, tokens, dtype=torch.int64, device="meta")
        loss = torch.empty(1, device="meta", requires_grad=True)
        stages = [
            PipelineStage(
                stage,
                index,
                len(self._costs),
                device,
                input_args=(ids if index == 0 else between,),
                output_args=(loss if index == self._last else between,),
                group=self._group,
            )
            for index, stage in self._own.items()
        ]
        kind = SCHEDULES[run.layout.schedule]
        of_rank: Any = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
        self._schedule = kind(of_rank, micro_batches, loss_fn=self._scaled, scale_grads=False)

    def _scaled(self, loss: Tensor, _targets: Tensor) -> Tensor:
        return loss.sum() * self._scale

    def describe(self) -> str:
        """The schedule, the stages and how much of the time ranks wait, in words."""
        layout, (layers, _) = self._run.layout, split_layers(self._run, len(self._costs))
        counts = ", ".join(str(len(of_stage)) for of_stage in layers)
        waiting = bubble(self._orders(), self._costs)
        return f"{layout.schedule}, stages of {counts} layers, bubble {waiting:.0%}"

    def _orders(self) -> list[list[Action]]:
        ranks, schedule = self._mesh.size(), self._run.layout.schedule
        if schedule in ("gpipe", "1f1b"):
            return simple_order(schedule, ranks, self._micro_batches)
        kinds: dict[str, Any] = {
            "FORWARD": "forward",
            "FULL_BACKWARD": "backward",
            "BACKWARD_INPUT": "inputs",
            "BACKWARD_WEIGHT": "weights",
        }
        return [
            [
                Action(kinds[a.computation_type.name], a.stage_index, a.microbatch_index)
                for a in self._schedule.pipeline_order[rank]
                if a is not None and a.computation_type.name in kinds
            ]
            for rank in range(ranks)
        ]

    def backward(self, tokens: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
        """Gradients of scale · loss over a step's micro-batches (batch, tokens).

        Returns scale · loss on the rank of the last stage, zero on the others.
        """
        self._scale = scale
        losses: list[Tensor] = []
        self._schedule.step(
            *([tokens] if 0 in self._own else []),
            target=targets if self._last in self._own else None,
            losses=losses,
            return_outputs=False,
            targets=targets,
        )
        self._join_tied_gradients()
        return torch.stack(losses).detach().sum() if losses else torch.zeros_like(scale)

    def _join_tied_gradients(self) -> None:
        """Add the gradients of the two copies of a tied embedding, on both."""
        first, last = self._owners[0], self._owners[self._last]
        me = self._mesh.get_local_rank()
        if not self._run.model.tie_embeddings or me not in (first, last):
            return
        gradients = [
            _own_gradient(module.weight)
            for stage in self._own.values()
            for module in (stage.embedding, stage.head)
            if module is not None
        ]
        if first == last:
            total = gradients[0] + gradients[1]
            for gradient in gradients:
                gradient.copy_(total)
            return
        (own,) = gradients
        other = torch.empty_like(own)
        peer = dist.get_global_rank(self._group, last if me == first else first)
        sending = dist.P2POp(dist.isend, own, peer, self._group)
        receiving = dist.P2POp(dist.irecv, other, peer, self._group)
        for work in dist.batch_isend_irecv([sending, receiving]):
            work.wait()
        own += other

    @torch.no_grad()
    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The summed cross-entropy, on every rank; without gradients."""
        loss = tokens.new_empty(1, dtype=torch.float32)
        out = self._through(tokens, lambda i, x: self._own[i](x, targets=targets), loss)
        return out.squeeze(0)

    def new_caches(self) -> list[KVCache]:
        """An empty cache per block of this rank."""
        patterns = [m.pattern for m in self.stages.modules() if isinstance(m, SelfAttention)]
        return [KVCache(pattern) for pattern in patterns]

    @torch.no_grad()
    def next_logits(self, tokens: Tensor, caches: list[KVCache]) -> Tensor:
        """Logits (batch, vocab) after the last of tokens (batch, tokens), on every rank."""
        of_stage, taken = {}, 0
        for index, stage in self._own.items():
            of_stage[index] = caches[taken : taken + len(stage.blocks)]
            taken += len(stage.blocks)
        logits = torch.empty(len(tokens), self._run.model.vocab, device=tokens.device)
        return self._through(tokens, lambda i, x: self._own[i](x, caches=of_stage[i]), logits)

    def _through(
        self, tokens: Tensor, stage: Callable[[int, Tensor], Tensor], result: Tensor
    ) -> Tensor:
        """`tokens` through every stage in turn; what the last returns is spread in `result`."""
        me, x = self._mesh.get_local_rank(), tokens
        for index in self._own:
            before, after = self._owners.get(index - 1, me), self._owners.get(index + 1, me)
            if before != me:
                rows, count = len(tokens), tokens.shape[1] // self._token_parts
                x = torch.empty(rows, count, self._features, device=tokens.device)
                dist.recv(x, dist.get_global_rank(self._group, before), self._group)
            x = stage(index, x)
            if after != me:
                dist.send(x.contiguous(), dist.get_global_rank(self._group, after), self._group)
        if self._last in self._own:
            result.copy_(x)
        dist.broadcast(
            result, dist.get_global_rank(self._group, self._owners[self._last]), self._group
        )
        return result


def _own_gradient(weight: Tensor) -> Tensor:
    """This rank's part of the gradient, split as the weight is."""
    if isinstance(weight, DTensor) and isinstance(weight.grad, DTensor):
        weight.grad = weight.grad.redistribute(placements=weight.placements)
        return weight.grad.to_local()
    assert weight.grad is not None
    return weight.grad

"""Pipeline parallelism: each rank holds some of the layers, and micro-batches flow through ranks.

The layers fall into stages: one per rank, or several ("interleaved", "zbv"). The schedules are
those of torch.distributed.pipelining; this file holds the stages they run, the gradients of a tied
embedding, and a forward pass through all stages without gradients, for evaluation and sampling.
`pipeline_schedule.py` says which layers a stage holds.

A tied embedding is needed by the first stage and by the last. Each holds a copy, and both add the
other's gradient to their own: the copies stay bitwise equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from longspan.attention import KVCaches
from longspan.models import Decoder
from longspan.models.decoder import SelfAttention, rope_table, scaled_embedding
from longspan.nn import cross_entropy_sum, logits_of
from longspan.parallel.choices import residual_split
from longspan.parallel.dtensor import reduced_grad
from longspan.parallel.pipeline_schedule import Action, StagePlan, bubble, simple_order

ForwardContext = Callable[[], AbstractContextManager[object]]
"""Makes the context of a forward pass: its autocast precision and activation offload."""


def build_schedule(
    name: str,
    local: Mapping[int, nn.Module],
    boundaries: Sequence[Tensor],
    micro_batches: int,
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    device: torch.device,
    group: dist.ProcessGroup,
) -> Any:
    """PyTorch's schedule of this rank's stages, which `local` has by their number.

    `boundaries`: the input of the first stage and the output of each, on the meta device; those
    with a gradient require one.
    """
    # Imported late: it loads torch.compile's modules, in more than a second.
    from torch.distributed.pipelining import PipelineStage, schedules

    kind = {
        "gpipe": schedules.ScheduleGPipe,
        "1f1b": schedules.Schedule1F1B,
        "interleaved": schedules.ScheduleInterleaved1F1B,
        "zbv": schedules.ScheduleZBVZeroBubble,
    }[name]
    stages = [
        PipelineStage(
            stage,
            index,
            len(boundaries) - 1,
            device,
            input_args=(boundaries[index],),
            output_args=(boundaries[index + 1],),
            group=group,
        )
        for index, stage in local.items()
    ]
    given: Any = stages[0] if issubclass(kind, schedules.PipelineScheduleSingle) else stages
    return kind(given, micro_batches, loss_fn=loss, scale_grads=False)


class Stage(nn.Module):
    """Some blocks of a decoder; the first stage has its embedding, the last its norm and head.

    The modules are the decoder's.
    """

    def __init__(
        self,
        model: Decoder,
        layers: range,
        *,
        is_first: bool,
        is_last: bool,
        forward_context: ForwardContext,
    ) -> None:
        super().__init__()
        self.embedding = model.embedding if is_first else None
        self.blocks = nn.ModuleList(model.blocks[layer] for layer in layers)
        self.norm = model.norm if is_last else None
        self.head = model.head if is_last else None
        self.rope, self.context = model.rope, model.context
        self.embedding_scale, self.z_loss = model.config.embedding_scale, model.z_loss
        self.positions, self.forward_context = model.positions, forward_context
        self.dropout, self.dropout_keys = model.dropout, model.dropout_keys

    def forward(
        self,
        x: Tensor,
        targets: Tensor | None = None,
        caches: KVCaches | None = None,
        documents: Tensor | None = None,
        samples: Tensor | None = None,
    ) -> Tensor:
        """Tokens (batch, tokens), or the output of the stage before, to (batch, tokens, hidden).

        The last stage returns the summed cross-entropy (1,) against `targets` or, without them,
        the logits (batch, vocab) after the last token.
        """
        if documents is not None:
            documents = documents.cpu()  # once, not in every block
        tokens = x if targets is None else targets
        rope = rope_table(
            self.rope, tokens, self.positions, self.context, caches=caches, documents=documents
        )
        keys = self.dropout_keys(samples, tokens.shape[1])
        with self.forward_context():
            if self.embedding is not None:
                x = scaled_embedding(self.embedding, x, self.embedding_scale)
                x = self.dropout(x, keys, 0)
                if torch.is_grad_enabled() and not x.requires_grad:
                    x.requires_grad_()  # all of the stage may be frozen, and its output needs one
            for index, block in enumerate(self.blocks):
                cache = caches.layers[index] if caches else None
                layer: int = block.index  # type: ignore[assignment]
                x = block(x, rope, cache, documents, self.dropout.keys_of_layer(keys, layer))
            if self.norm is None or self.head is None:
                return x
            x = self.norm(x)
            if targets is None:
                return logits_of(x[:, -1], self.head.weight)
            loss = cross_entropy_sum(x, self.head.weight, targets, z_loss=self.z_loss)
            return torch.stack([loss])


def drop_remote_layers(model: Decoder, plan: StagePlan, rank: int) -> None:
    """Remove from `model`, on the meta device, all that other pipeline ranks hold.

    Names do not change, except that the last stage's copy of a tied embedding is called its head.
    """
    local, config = plan.by_rank[rank], model.config
    if model.head is None and plan.last in local:
        model.head = nn.Linear(config.hidden, config.vocab, bias=False, device="meta")
    local_layers = {layer for stage in local for layer in plan.layers[stage]}
    for layer in range(config.layers):
        if layer not in local_layers:
            model.blocks[layer] = nn.Identity()
    if 0 not in local:
        del model.embedding
    if plan.last not in local:
        del model.norm
        model.head = None


class PipelinedDecoder(nn.Module):
    """A decoder whose stages lie on the ranks of the one-dimensional `mesh`."""

    def __init__(
        self, model: Decoder, plan: StagePlan, mesh: DeviceMesh, forward_context: ForwardContext
    ) -> None:
        """`model`: what `drop_remote_layers` has left of it."""
        super().__init__()
        self._plan, self._config, self.positions = plan, model.config, model.positions
        self._has_tied_gradients = model.config.tie_embeddings and model.trains("embedding.weight")
        self._mesh, self._group = mesh, mesh.get_group()
        self._local = {
            stage: Stage(
                model,
                plan.layers[stage],
                is_first=stage == 0,
                is_last=stage == plan.last,
                forward_context=forward_context,
            )
            for stage in plan.by_rank[mesh.get_local_rank()]
        }
        self.stages = nn.ModuleList(self._local.values())
        self._scale = torch.ones(())
        self._micro_batches = self._token_splits = 1
        self._features, self._context = model.config.hidden, model.context
        self.schedule: Any = None

    def build_schedule(
        self,
        micro_batches: int,
        micro_batch_shape: tuple[int, int],
        *,
        tensor_ranks: int,
        megatron_sequence_parallel: bool,
        device: torch.device,
    ) -> None:
        """Build the schedule, once the stages are allocated.

        `micro_batch_shape`: (batch, tokens) on this rank. Between stages the residual stream is
        split over `tensor_ranks` as `tensor.residual_split` says.
        """
        batch, tokens = micro_batch_shape
        split = residual_split(self._config, megatron_sequence_parallel)
        self._micro_batches = micro_batches
        self._token_splits = tensor_ranks if split == "tokens" else 1
        self._features //= tensor_ranks if split == "features" else 1
        shape = (batch, tokens // self._token_splits, self._features)
        # The residual stream is float32 under autocast too.
        residual = torch.empty(shape, device="meta", requires_grad=True)
        ids = torch.empty(batch, tokens, dtype=torch.int64, device="meta")
        loss = torch.empty(1, device="meta", requires_grad=True)
        self.schedule = build_schedule(
            self._plan.schedule,
            self._local,
            [ids, *[residual] * self._plan.last, loss],
            micro_batches,
            self._scaled,
            device=device,
            group=self._group,
        )

    def _scaled(self, loss: Tensor, _targets: Tensor) -> Tensor:
        return loss.sum() * self._scale

    def describe(self) -> str:
        """The schedule, the layers of each stage, and the bubble."""
        counts = ", ".join(str(len(layers)) for layers in self._plan.layers)
        idle = bubble(self.actions(), self._plan.flops)
        return f"{self._plan.schedule}, stages of {counts} layers, bubble {idle:.0%}"

    def actions(self) -> list[list[Action]]:
        """What each rank does in a step, in order."""
        ranks = self._mesh.size()
        if self._plan.schedule in ("gpipe", "1f1b"):
            return simple_order(self._plan.schedule, ranks, self._micro_batches)
        kinds: dict[str, Any] = {
            "FORWARD": "forward",
            "FULL_BACKWARD": "backward",
            "BACKWARD_INPUT": "inputs",
            "BACKWARD_WEIGHT": "weights",
        }
        return [
            [
                Action(kinds[a.computation_type.name], a.stage_index, a.microbatch_index)
                for a in self.schedule.pipeline_order[rank]
                if a is not None and a.computation_type.name in kinds
            ]
            for rank in range(ranks)
        ]

    def backward(
        self,
        tokens: Tensor,
        targets: Tensor,
        scale: Tensor,
        documents: Tensor | None = None,
        samples: Tensor | None = None,
    ) -> Tensor:
        """Compute the gradients of scale · loss over a step's micro-batches (batch, tokens).

        Returns scale · loss on the rank of the last stage, zero on the others.
        """
        self._scale = scale
        losses: list[Tensor] = []
        self.schedule.step(
            *([tokens] if 0 in self._local else []),
            target=targets if self._plan.last in self._local else None,
            losses=losses,
            return_outputs=False,
            targets=targets,
            **({} if documents is None else {"documents": documents}),
            **({} if samples is None else {"samples": samples}),
        )
        self._reduce_tied_gradients()
        return torch.stack(losses).detach().sum() if losses else torch.zeros_like(scale)

    def _reduce_tied_gradients(self) -> None:
        """Sum the gradients of the two copies of a tied embedding, on both ranks."""
        first, last = self._plan.rank_of(0), self._plan.rank_of(self._plan.last)
        rank = self._mesh.get_local_rank()
        if not self._has_tied_gradients or rank not in (first, last):
            return
        gradients = [
            gradient
            for stage in self._local.values()
            for module in (stage.embedding, stage.head)
            if module is not None and (gradient := reduced_grad(module.weight)) is not None
        ]
        if first == last:
            total = gradients[0] + gradients[1]
            for gradient in gradients:
                gradient.copy_(total)
            return
        (local,) = gradients
        remote = torch.empty_like(local)
        peer = self._global_rank(last if rank == first else first)
        sending = dist.P2POp(dist.isend, local, peer, self._group)
        receiving = dist.P2POp(dist.irecv, remote, peer, self._group)
        for work in dist.batch_isend_irecv([sending, receiving]):
            work.wait()
        local += remote

    @torch.no_grad()
    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """The summed cross-entropy, on every rank; without gradients."""
        if targets is None:
            raise ValueError(
                "a pipeline computes the loss, not the logits of every token: give targets, or set "
                "layout.pipeline = 1"
            )
        loss = tokens.new_empty(1, dtype=torch.float32)
        given = {"targets": targets, "documents": documents}
        out = self._run_stages(tokens, lambda i, x: self._local[i](x, **given), loss)
        return out.squeeze(0)

    def new_caches(self, capacity: int | None = None) -> KVCaches:
        """Empty KV caches of this rank's blocks, of the context or `capacity` tokens."""
        patterns = [m.pattern for m in self.stages.modules() if isinstance(m, SelfAttention)]
        return KVCaches(patterns, capacity or self._context)

    @torch.no_grad()
    def next_logits(self, tokens: Tensor, caches: KVCaches) -> Tensor:
        """Logits (batch, vocab) after the last of tokens (batch, tokens), on every rank.

        Tokens that follow others come one at a time.
        """
        parts = caches.split([len(stage.blocks) for stage in self._local.values()])
        by_stage = dict(zip(self._local, parts, strict=True))
        logits = torch.empty(len(tokens), self._config.vocab, device=tokens.device)
        self._run_stages(tokens, lambda i, x: self._local[i](x, caches=by_stage[i]), logits)
        caches.advance(tokens)
        return logits

    def _run_stages(
        self, tokens: Tensor, stage: Callable[[int, Tensor], Tensor], result: Tensor
    ) -> Tensor:
        """Run `tokens` through every stage; the last stage's output is broadcast in `result`."""
        rank, x, plan = self._mesh.get_local_rank(), tokens, self._plan
        for index in self._local:
            before = plan.rank_of(index - 1) if index > 0 else rank
            after = plan.rank_of(index + 1) if index < plan.last else rank
            if before != rank:
                batch, count = len(tokens), tokens.shape[1] // self._token_splits
                x = torch.empty(batch, count, self._features, device=tokens.device)
                dist.recv(x, self._global_rank(before), self._group)
            x = stage(index, x)
            if after != rank:
                dist.send(x.contiguous(), self._global_rank(after), self._group)
        if plan.last in self._local:
            result.copy_(x)
        dist.broadcast(result, self._global_rank(plan.rank_of(plan.last)), self._group)
        return result

    def _global_rank(self, pipeline_rank: int) -> int:
        return dist.get_global_rank(self._group, pipeline_rank)

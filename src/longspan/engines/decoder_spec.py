"""The decoder as engines train it."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from longspan.checkpoint import Region
from longspan.config import Layout, Train
from longspan.data import Batch
from longspan.models import Decoder, parameter_shapes, stored_shapes
from longspan.models.initial import allocate, initial_weight, initialize, round_matrices
from longspan.parallel.apply import apply_to_blocks, materialize, parallelize
from longspan.parallel.chunks import ChunkedDecoder
from longspan.parallel.collectives import all_reduce_max
from longspan.parallel.mesh import ParallelMesh
from longspan.parallel.pipeline import ForwardContext
from longspan.parallel.sequence import local_tokens


class DecoderSpec:
    """The decoder, which comes on the meta device."""

    block_classes = ("Block",)
    may_skip_parameters = False
    chunked: ChunkedDecoder | None = None
    """Walks sequences in chunks, if `train.chunk_tokens` says so."""

    def __init__(self, model: Decoder) -> None:
        self.model, self.shapes = model, parameter_shapes(model)
        self._stored = stored_shapes(model).keys()

    def is_stored(self, name: str) -> bool:
        return name in self._stored

    def rebuild(self) -> Decoder:
        return Decoder(
            self.model.config,
            self.model.patterns,
            self.model.context,
            has_documents=self.model.has_documents,
            z_loss=self.model.z_loss,
            rounds_residual=self.model.rounds_residual,
            freeze=self.model.freeze,
            seed=self.model.seed,
        )

    def parallelize(
        self, mesh: ParallelMesh, layout: Layout, train: Train, forward_context: ForwardContext
    ) -> nn.Module:
        if train.parameter_precision == "bf16":
            round_matrices(self.model)
        if train.chunk_tokens:
            # FSDP gathers parameters in every pass, of which ranks must take equally many.
            must_agree = mesh.is_fsdp and mesh.data_ranks > 1
            self.chunked = ChunkedDecoder(
                self.model,
                train.chunk_tokens,
                offload=train.offload_chunk_rows,
                group=mesh.sequence_group,
                agree=partial(all_reduce_max, mesh) if must_agree else None,
            )
        return parallelize(self.model, mesh, layout, train, forward_context)

    def materialize(
        self,
        module: nn.Module,
        mesh: ParallelMesh,
        layout: Layout,
        train: Train,
        device: torch.device,
    ) -> nn.Module:
        return materialize(module, self.model, mesh, layout, train, device)

    def initialize(self, train: Train, mesh: ParallelMesh, device: torch.device) -> None:
        allocate(self.model, device)
        initialize(self.model, train.seed, self.model.named_parameters())

    def wrap_blocks(self, model: nn.Module, train: Train) -> None:
        assert isinstance(model, Decoder)
        apply_to_blocks(model, train)

    def initial_weight(self, seed: int, name: str, region: Region) -> Tensor:
        shape = self.shapes[name]
        full = initial_weight(self.model.config, seed, name, torch.Size(shape))
        return full[region.slices_within(Region.full(shape))]

    def loss(self, module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | None]:
        return module(*self.local(batch)), None

    def local(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """This rank's tokens and targets (batch, tokens), the documents of all tokens, and with
        dropout the indices of the samples (batch,).
        """
        tokens, targets = (local_tokens(self.model, x) for x in (batch.tokens, batch.targets))
        samples = batch.samples if self.model.config.dropout else None
        assert samples is not None or not self.model.config.dropout
        return tokens, targets, batch.documents, samples

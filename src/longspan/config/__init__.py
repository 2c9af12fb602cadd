"""The run file as frozen, typed data: its sections, keys and defaults. Imports no torch.

Each section has a module. `runfile` reads TOML, YAML and overrides into a `Run`; `rules` checks
what must hold between its values; `derived.py` describes what follows from them.
"""

from __future__ import annotations

from longspan.config.attention import (
    BLOCK_SPARSE,
    BLOCK_SPARSE_KEYS,
    DILATED,
    DILATED_KEYS,
    WINDOW_KEYS,
    Attention,
    LayerAttention,
    RepeatedAttention,
    attention_keys,
)
from longspan.config.data import Data
from longspan.config.engine import Engine
from longspan.config.layout import AUTO, AXES, Backend, Layout
from longspan.config.model import Lora, Model, Preset, Rope, Sketch, default_ffn
from longspan.config.section import (
    MAX_INT,
    Integer,
    Layers,
    NonNegative,
    Positive,
    Section,
    Theta,
    Width,
)
from longspan.config.track import Checkpoint, Profile, Sink, Track
from longspan.config.train import Train
from longspan.hardware import may_have_gpu

__all__ = [
    "AUTO",
    "AXES",
    "BLOCK_SPARSE",
    "BLOCK_SPARSE_KEYS",
    "DILATED",
    "DILATED_KEYS",
    "MAX_INT",
    "SECTIONS",
    "WINDOW_KEYS",
    "Attention",
    "Backend",
    "Checkpoint",
    "Data",
    "Engine",
    "Integer",
    "LayerAttention",
    "Layers",
    "Layout",
    "Lora",
    "Model",
    "NonNegative",
    "Positive",
    "Preset",
    "Profile",
    "RepeatedAttention",
    "Rope",
    "Run",
    "Section",
    "Sink",
    "Sketch",
    "Theta",
    "Track",
    "Train",
    "Width",
    "attention_keys",
    "default_ffn",
]


class Run(Section):
    """A run file. It has one table per section, and each is optional."""

    model: Model = Model()
    attention: Attention = Attention()
    data: Data = Data()
    layout: Layout = Layout()
    train: Train = Train()
    engine: Engine = Engine()
    checkpoint: Checkpoint = Checkpoint()
    track: Track = Track()

    def replaces_lost_ranks(self, world: int) -> bool:
        """Whether a rank that is lost on one machine can be replaced while the others go on.

        Its state must lie on another rank too, and its collectives must be gloo's: those of NCCL
        cannot be left without ending the process. The other engines do not build their process
        groups a second time, and compiled blocks have not been tried.
        """
        train = self.train
        on_cpu = train.device == "cpu" or (train.device == "auto" and not may_have_gpu())
        is_native = self.engine.name == "native" and train.compile is not True
        is_native = is_native and self.layout.backend != "mpi"
        return on_cpu and is_native and self.layout.resolve(world)["replicate"] > 1


SECTIONS: dict[str, type[Section]] = {
    name: field.annotation  # type: ignore[misc]
    for name, field in Run.model_fields.items()
}

"""What follows from a run file, as text for people."""

from __future__ import annotations

from collections.abc import Mapping

from longspan.config import (
    DILATED_KEYS,
    Attention,
    LayerAttention,
    Model,
    Run,
    Train,
    attention_keys,
)
from longspan.costs import linear_costs
from longspan.vocabulary import MULTIPLE, is_folder, rounded_vocab, vocab_of_sources
from longspan.wording import counted


def derived_values(run: Run, ranks: Mapping[str, int]) -> dict[str, str]:
    """Return what follows from a run on `ranks` per axis: attention, batch, tokens, layout."""
    train, context = run.train, run.data.context
    tokens, steps = train.global_batch * context, counted(train.steps, "step")
    batch, rope = batch_values(run, ranks), run.model.rope
    sinks = ", learnable sinks" if run.model.learnable_sinks else ""
    scaling = "" if rope.type == "default" else f", {rope.describe()}"
    linear = {} if run.model.linear == "dense" else {"linear layers": _linear_text(run.model)}
    data_vocab = {"vocabulary": _vocab_text(run)} if any(map(is_folder, run.data.sources)) else {}
    return {
        **linear,
        **data_vocab,
        "attention": f"{attention_text(run.attention)}{sinks}, context {context:,}, "
        f"RoPE theta {run.model.rope_theta_for(context):,.0f}{scaling}",
        "reach": reach_text(run),
        **_chunk_text(run),
        "batch": batch.pop("batch"),
        "tokens": f"{tokens:,} per step × {steps} = {tokens * train.steps:,}{_epochs_text(train)}",
        **batch,
    }


def _epochs_text(train: Train) -> str:
    if train.epochs is None:
        return ""
    return f" ({'1 epoch' if train.epochs == 1 else f'{train.epochs:g} epochs'})"


def _chunk_text(run: Run) -> dict[str, str]:
    size, context = run.train.chunk_tokens, run.data.context
    if not 0 < size < context:
        return {}
    where = ", their keys and values offloaded to CPU" if run.train.offload_chunk_rows else ""
    return {"chunks": f"{-(-context // size):,} per sequence, of {size:,} tokens{where}"}


def model_name(run: Run) -> str:
    """The name of a run's model: its preset, or the family and folder that decide it."""
    folder = run.model.folder or run.train.init_from
    return f"{run.model.family} of {folder}" if folder else run.model.preset


def batch_values(run: Run, ranks: Mapping[str, int]) -> dict[str, str]:
    """Return what follows from a run whatever its model is: batch, learning rate, layout."""
    train, data_parallel = run.train, ranks["replicate"] * ranks["shard"]
    accumulation = train.global_batch // (train.micro_batch * data_parallel)
    return {
        "batch": f"{train.global_batch} = micro-batch {train.micro_batch} × gradient accumulation "
        f"{accumulation} × data-parallel {data_parallel}",
        "learning rate": f"{train.peak_lr:g} peak, {schedule_text(train)}",
        "layout": " × ".join(f"{axis} {n}" for axis, n in ranks.items())
        + (f", ZeRO stage {run.layout.zero}" if ranks["shard"] > 1 else ""),
        **({"auto layout": run.layout.why_auto} if run.layout.why_auto else {}),
    }


def schedule_text(train: Train) -> str:
    return f"{train.schedule}, {_warmup_text(train)}"


def _vocab_text(run: Run) -> str:
    size, sources = run.model.vocab, run.data.sources
    needed = vocab_of_sources(sources)
    if needed is None:
        return f"{size:,}; {', '.join(sources)} does not say what its tokenizer has"
    if size == needed:
        return f"{size:,}, that of the tokenizer"
    if size == rounded_vocab(needed):
        return f"{size:,}: the tokenizer's {needed:,}, rounded up to a multiple of {MULTIPLE}"
    return f"{size:,}; the tokenizer has {needed:,}"


def _warmup_text(train: Train) -> str:
    text = counted(train.warmup_steps, "warmup step")
    if train.warmup_steps <= train.steps:
        return text
    return f"{text}; warning: the run ends during the warmup, so the peak is never reached"


def reach_text(run: Run) -> str:
    """How far back the last token looks, with a warning if that is not the whole context."""
    from longspan.attention.pattern import patterns_of, reach  # loads torch

    layers, context = run.model.layers, run.data.context
    tokens = reach(patterns_of(run.attention, layers), context, run.model.heads)
    depth = "1 layer" if layers == 1 else f"{layers} layers"
    text = f"over {depth} the last token depends on tokens at most {tokens:,} back, of {context:,}"
    if tokens == context:
        return text
    advice = {
        "dilated": f"add a segment of {context:,} tokens to attention.segment_lengths",
        "window": "raise attention.window or set attention.sinks",
        "block_sparse": "raise attention.local_window or set attention.global_tokens",
        "dilated_block_sparse": f"add a segment of {context:,} tokens to attention.segment_lengths "
        "or raise attention.local_window",
    }
    change = " or ".join(dict.fromkeys(advice[kind] for kind in run.attention.kinds))
    return f"{text}; warning: nothing earlier can influence it: {change}, or lower data.context"


def _linear_text(model: Model) -> str:
    dense, cost = linear_costs(model)
    training = (cost.forward + cost.backward) / (dense.forward + dense.backward)
    return (
        f"{model.linear}, {cost.stored:,} parameters instead of {dense.stored:,} "
        f"({cost.stored / dense.stored:.1%}), {cost.forward / dense.forward:.1%} of the FLOPs "
        f"forward, {training:.1%} in training"
    )


def attention_text(attention: Attention) -> str:
    """The pattern of all layers in words, or those that they have in turn."""
    if not attention.layers:
        return pattern_text(attention)
    cycle = ", ".join(f"{layer.repeat} × {pattern_text(layer)}" for layer in attention.layers)
    return f"in turn {cycle}"


def pattern_text(attention: LayerAttention) -> str:
    """A pattern in words."""
    branches = zip(attention.segment_lengths, attention.dilation_rates, strict=True)
    text = "".join(f" {w}/{r}" for w, r in branches)
    keys = (key for key in attention_keys(attention.kind) if key not in DILATED_KEYS)
    values = {key: getattr(attention, key) for key in keys}
    return (
        attention.kind
        + text
        + "".join(f" {key} {value:g}" for key, value in values.items() if value)
    )

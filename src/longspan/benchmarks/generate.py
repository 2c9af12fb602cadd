"""`longspan bench generate`: decoding with a full KV cache, beside the generate of transformers.

The model has random weights. A prompt of up to `prefill` tokens runs through the model; of a longer
one the KV cache is filled with random rows, which take a step as long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longspan.attention import Dense, Dilated, KVCaches, Pattern
from longspan.benchmarks.measure import Rows, machine, open_console, write_json
from longspan.config import Run
from longspan.device import DTYPES, autocast, resolve
from longspan.errors import UserError
from longspan.models import Decoder, new_decoder
from longspan.models.decoder import SelfAttention
from longspan.models.decoding import DecodeStep, round_weights
from longspan.models.initial import allocate
from longspan.presets import SEGMENTS
from longspan.runfile import load_run

WARM_UP = 3
"""Steps before those that are timed; the first one captures the CUDA graph."""


@dataclass(frozen=True)
class Setting:
    device: str
    preset: str
    lengths: tuple[int, ...]
    tokens: int
    prefill: int


CPU = Setting("cpu", "tiny", (1024, 4096), 50, 4096)
GPU = Setting("cuda", "1.3b", (8192, 131_072, 1_048_576), 64, 131_072)


@dataclass(frozen=True)
class Result:
    """A measured row; None where the GPU has not enough memory, or nothing was measured."""

    tokens: int
    """The length of the sequence at the end."""
    attention: str
    prefill_s: float | None = None
    cache_bytes: int | None = None
    ms_per_token: float | None = None

    @property
    def tokens_per_s(self) -> float | None:
        return None if self.ms_per_token is None else 1e3 / self.ms_per_token


def bench_generate(setting: Setting, json_file: Path | None) -> None:
    """Print a table, and write it as JSON."""
    shortest = WARM_UP + setting.tokens + 1
    if setting.tokens < 2 or min(setting.lengths) <= shortest:
        raise UserError(
            f"expected --tokens >= 2 and --lengths > {shortest}, got {setting.tokens} and "
            f"{min(setting.lengths)}"
        )
    console = open_console(json_file)
    run = _run(setting)
    model, where = _model(run), machine(setting.device)
    console.print(
        f"{where}; {setting.preset}, {run.train.precision}, batch 1, {setting.tokens} tokens timed",
        markup=False,
    )
    columns = {"tokens": 9, "attention": -14, "prefill s": 9, "cache GiB": 9, "ms/token": 9}
    table, results = Rows(console, {**columns, "tok/s": 9}), list[Result]()
    for length in setting.lengths:
        measures: list[Callable[[], Result]] = [
            partial(_measure, run, model, Dense(), "dense", length, setting),
            partial(_measure, run, model, _dilated(setting, length), "dilated", length, setting),
        ]
        for name, measure in zip(("dense", "dilated"), measures, strict=True):
            results.append(_or_out_of_memory(measure, length, name))
            table.add(*_cells(results[-1]))
    del model, measures, measure  # before the other model
    compared = [length for length in setting.lengths if length <= setting.prefill]
    if compared and find_spec("transformers") is None:
        console.print("transformers is not installed: nothing to compare with", markup=False)
        compared = []
    for length in compared:
        measure = partial(_measure_transformers, run, length, setting)
        results.append(_or_out_of_memory(measure, length, "transformers"))
        table.add(*_cells(results[-1]))
    rows = [{**asdict(x), "tokens_per_s": x.tokens_per_s} for x in results]
    write_json(json_file, where, asdict(setting), rows)


def _cells(x: Result) -> list[str]:
    if x.ms_per_token is None:
        return [f"{x.tokens:,}", x.attention, "", "", "out of memory"]
    return [
        f"{x.tokens:,}",
        x.attention,
        "random" if x.prefill_s is None else f"{x.prefill_s:.2f}",
        "" if x.cache_bytes is None else f"{x.cache_bytes / 2**30:.3f}",
        f"{x.ms_per_token:.3f}",
        f"{x.tokens_per_s:,.1f}",
    ]


def _or_out_of_memory(measure: Callable[[], Result], length: int, name: str) -> Result:
    try:
        return measure()
    except torch.OutOfMemoryError:
        return Result(length, name)
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _run(setting: Setting) -> Run:
    options = [f"model.preset={setting.preset}", f"data.context={max(setting.lengths)}"]
    options += ["attention.kind=dense", "train.micro_batch=1", "train.global_batch=1"]
    return resolve(
        load_run(None, [*options, f"train.device={setting.device}"]), torch.device(setting.device)
    )


def _dilated(setting: Setting, length: int) -> Dilated:
    """Segments that double up to the whole length, and rates with them."""
    segments = [SEGMENTS[setting.preset]]
    while segments[-1] < length:
        segments.append(2 * segments[-1])
    return Dilated(tuple(segments), tuple(2**i for i in range(len(segments))))


@torch.no_grad()
def _model(run: Run) -> Decoder:
    """The model with random weights, drawn on its device."""
    device = torch.device(run.train.device)
    model = new_decoder(run)
    allocate(model, device)
    for parameter in model.parameters():
        parameter.normal_(0, 0.02) if parameter.dim() > 1 else parameter.fill_(1)
    if run.train.precision in DTYPES:
        round_weights(model, DTYPES[run.train.precision])
    return model


@torch.inference_mode()
def _measure(
    run: Run, model: Decoder, pattern: Pattern, name: str, length: int, setting: Setting
) -> Result:
    for layer in model.modules():
        if isinstance(layer, SelfAttention):
            layer.pattern = pattern
    device, context = torch.device(setting.device), partial(autocast, run.train)
    caches = model.new_caches(length)
    prompt = length - WARM_UP - setting.tokens
    tokens = torch.randint(run.model.vocab, (1, prompt), device=device)
    prefill_s = None
    if length <= setting.prefill:
        with context():
            model.next_logits(tokens[:, :1024], model.new_caches(1024))  # kernels are compiled
            with _seconds(device) as seconds:
                model.next_logits(tokens, caches)
        (prefill_s,) = seconds
    else:
        _fill(run, caches, prompt, device)
    step = DecodeStep(model.next_logits, caches, context, captures=device.type == "cuda")
    newest = tokens[:, -1:]
    for _ in range(WARM_UP):
        newest = step(newest).argmax(-1, keepdim=True)
    with _seconds(device) as seconds:
        for _ in range(setting.tokens):
            newest = step(newest).argmax(-1, keepdim=True)
    return Result(length, name, prefill_s, caches.bytes, 1e3 * seconds[0] / setting.tokens)


def _fill(run: Run, caches: KVCaches, tokens: int, device: torch.device) -> None:
    """Fill KV caches with random rows, as if they held so many tokens."""
    model, dtype = run.model, DTYPES.get(run.train.precision, torch.float32)
    q, k = (
        torch.empty(1, 0, heads, model.head_dim, dtype=dtype, device=device)
        for heads in (model.heads, model.kv_heads)
    )
    for cache in caches.layers:
        cache.allocate(q, k)
        cache.keys.normal_()
        cache.values.normal_()
    caches.advance(torch.empty(1, tokens, device=device))


@contextmanager
def _seconds(device: torch.device) -> Iterator[list[float]]:
    """Append the seconds that the body takes on the device."""
    found: list[float] = []
    _wait(device)
    start = time.perf_counter()
    yield found
    _wait(device)
    found.append(time.perf_counter() - start)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


class _Clock:
    """A streamer of transformers that notes when the prompt and each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...


def _measure_transformers(run: Run, length: int, setting: Setting) -> Result:
    """A Llama of the same shape, dense, with the cache that its generate uses by default."""
    import transformers

    library: Any = transformers
    shape, device = run.model, torch.device(setting.device)
    config = library.LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        tie_word_embeddings=shape.tie_embeddings,
        max_position_embeddings=length,
        attn_implementation="sdpa",
        bos_token_id=None,
        eos_token_id=None,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES.get(run.train.precision, torch.float32))
    try:
        with device:
            model = library.LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    prompt = torch.randint(shape.vocab, (1, length - setting.tokens), device=device)
    options = {"do_sample": False, "pad_token_id": 0}
    with torch.inference_mode():
        model.generate(prompt[:, :1024], max_new_tokens=4, **options)
        clock = _Clock()
        _wait(device)
        model.generate(prompt, max_new_tokens=setting.tokens, streamer=clock, **options)
    first, *rest = clock.times[1:]  # after the prompt itself
    ms = 1e3 * (rest[-1] - first) / len(rest)
    return Result(length, "transformers", first - clock.times[0], None, ms)

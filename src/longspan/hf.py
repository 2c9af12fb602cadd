"""Attention for models of Hugging Face transformers: attn_implementation="longspan".

Importing this module registers it. A causal decoder whose config has a table `longspan`, such as
`{"attention": {"kind": "dilated", "segment_lengths": [2048, 8192], "dilation_rates": [1, 4]}}`
with the keys of a run file's [attention], then attends by that pattern, in training and with
transformers' own KV caches. What its models pass to attention is honoured, harmless, or refused by
name.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from longspan.attention import Dilated, Pattern, attend, attend_newest, patterns_of
from longspan.errors import UserError
from longspan.hf_config import read_attention
from longspan.wording import shown

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import causal_mask_function, sdpa_mask
except ImportError as error:
    raise ImportError(f"longspan.hf needs transformers: {error}; use longspan[hf]") from error

NAME = "longspan"
"""The attn_implementation, and the table in a model's config."""

HARMLESS = {
    *("position_ids", "cache_position", "use_cache", "past_key_values", "return_dict"),
    *("output_hidden_states", "num_items_in_batch", "logits_to_keep"),
}
"""Arguments of models that reach attention and do not change it. All others are refused."""

HINTS = {
    "sliding_window": "set config.sliding_window = None, or to the context, and use a pattern of "
    'kind "window"',
    "cu_seq_lens_q": "leave it out: position_ids that start again mark the documents of a sequence",
}
"""What to change instead of another attn_implementation, by refused argument."""


def longspan_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention by the pattern in `module.config`: (batch, queries, heads, head_dim).

    query: (batch, heads, queries, head_dim); key, value: (batch, kv_heads, keys, head_dim), those
    of the cache included. `attention_mask` is that of `longspan_mask`. The queries are the last
    positions. `s_aux` (heads,) are the learnable attention sinks of models like GptOss. Attention
    weights are never computed: the second value is None.
    """
    if (others.get("sliding_window") or 0) >= key.shape[2]:
        others["sliding_window"] = None  # it hides nothing
    for name, given in others.items():
        if name not in HARMLESS and given is not None and given is not False:
            raise _refused(name, shown(given) if isinstance(given, (int, float, str)) else "")
    pattern = _pattern(module, query.shape[1])
    is_decoder = getattr(module, "is_causal", True)
    if not is_decoder or (is_causal is False and query.shape[2] > 1):
        raise _refused("is_causal", "false")
    if attention_mask is None:
        return _attend(query, key, value, pattern, dropout, scaling, sinks=s_aux), None
    is_ours = attention_mask.dtype == torch.int64 and attention_mask.shape[2:] == (1, 1)
    if not is_ours or attention_mask.shape[0] != query.shape[0]:
        raise UserError(
            f'attn_implementation="{NAME}" takes an attention_mask (batch, tokens), 0 for padding, '
            f"got {attention_mask.dtype} {tuple(attention_mask.shape)}: the pattern decides which "
            "keys a query sees"
        )
    ids = attention_mask[:, :, 0, 0]
    return _attend_padded(query, key, value, ids, pattern, dropout, scaling, s_aux), None


def longspan_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor | None:
    """What transformers hands to `longspan_attention` instead of a mask of tokens × tokens.

    int64 (batch, keys, 1, 1): each key's document, or −1 for padding, up to the last query. None
    if there is one document without padding, and no key after the last query.
    """
    if local_size is not None and local_size < kv_length:
        raise _refused("sliding_window", str(local_size))
    if use_vmap:
        raise _refused("a mask function of the model (or_mask_function, and_mask_function)")
    if kv_offset:
        raise _refused("a KV cache that drops keys")
    keys = int(q_offset) + q_length
    documents = None
    if mask_function is not causal_mask_function:
        documents = _documents(mask_function, batch_size, keys, device)
    padding = None
    if attention_mask is not None:
        if attention_mask.shape[1] < keys:
            raise UserError(
                f"attention_mask must cover all {keys} tokens, those in the KV cache included, "
                f"got {tuple(attention_mask.shape)}"
            )
        padding = ~attention_mask[:, :keys].bool()
        padding = padding if padding.any() else None
    if documents is None and padding is None and keys == kv_length:
        return None
    ids = torch.zeros(batch_size, keys, dtype=torch.int64, device=device)
    if documents is not None:
        ids = documents
    if padding is not None:
        ids = ids.masked_fill(padding, -1)
    return ids[:, :, None, None]


def _documents(
    mask_function: Callable[..., Any], batch: int, keys: int, device: torch.device | str
) -> Tensor:
    """The document of each token, int64 (batch, keys), from a mask that is causal within them."""
    rows = torch.arange(batch, device=device)[:, None]
    position = torch.arange(keys, device=device)[None]
    before, after = position[:, :-1], position[:, 1:]
    head = torch.zeros((), dtype=torch.int64, device=device)
    if mask_function(rows, head, before, after).any():
        raise _refused("a mask that is not causal")
    starts = ~mask_function(rows, head, after, before)
    first = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    return torch.cat([first, starts.expand(batch, -1).cumsum(1)], dim=1)


def _attend_padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ids: Tensor,
    pattern: Pattern,
    dropout: float,
    scaling: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """`_attend` on each row without its padding, so that positions count from its first token.

    Outputs at padding are zero. Rows with the same padding are computed together. `key` and `value`
    may be longer than `ids` (batch, keys): a static cache has room for more.
    """
    batch, heads, queries, head_dim = query.shape
    keys, on_cpu = ids.shape[1], ids.cpu()  # one wait for the GPU
    extents = [_extent(row) for row in on_cpu >= 0]
    has_documents = bool((on_cpu > 0).any())
    before = keys - queries
    out: Tensor | None = None
    for start, stop in sorted(set(extents)):
        first = max(start, before)  # the first query that is not padding
        if first >= stop:
            continue
        same = [row for row, extent in enumerate(extents) if extent == (start, stop)]
        rows = slice(None) if len(same) == batch else torch.tensor(same, device=query.device)
        found = _attend(
            query[rows][:, :, first - before : stop - before],
            key[rows][:, :, start:stop],
            value[rows][:, :, start:stop],
            pattern,
            dropout,
            scaling,
            ids[rows][:, start:stop] if has_documents else None,
            sinks,
        )
        if len(same) == batch and found.shape[1] == queries:  # no padding among the queries
            return found
        if out is None:
            out = found.new_zeros(batch, queries, heads, head_dim)
        out[rows, first - before : stop - before] = found
    return query.new_zeros(batch, queries, heads, head_dim) if out is None else out


def _extent(real: Tensor) -> tuple[int, int]:
    """Where the tokens of a row start and stop, of bool (keys,), False for padding."""
    tokens = real.nonzero().flatten().tolist()
    if not tokens:
        return 0, 0
    start, stop = tokens[0], tokens[-1] + 1
    if stop - start > len(tokens):
        raise UserError(
            "the padding of attention_mask must be at the left or the right of a row, got zeros "
            "between ones; without attention_mask, generate() takes tokens for padding that equal "
            "pad_token_id"
        )
    return start, stop


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    dropout: float,
    scaling: float | None,
    documents: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of the last positions, heads first; returns tokens first.

    Under autocast all three are cast, as for torch's attention: rotary embeddings leave float32.
    """
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if query.shape[2] == 1 and documents is None and dropout == 0 and not needs_grad:
        newest = query.transpose(1, 2)
        return attend_newest(newest, key, value, pattern, scale=scaling, sink_logits=sinks)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    seed = int(torch.randint(1 << 31, ())) if dropout > 0 else 0
    options: dict[str, Any] = {"dropout_p": dropout, "dropout_seed": seed, "sink_logits": sinks}
    return attend(q, k, v, pattern, scale=scaling, documents=documents, **options)


def _pattern(module: nn.Module, heads: int) -> Pattern:
    """The pattern in the config of an attention module with this many heads."""
    config: Any = module.config
    table = getattr(config, NAME, None)
    if table is None:
        raise UserError(
            f'attn_implementation="{NAME}" needs a pattern in the config, but '
            f"{type(config).__name__} has no {NAME}: set config.{NAME} = "
            '{"attention": {"kind": "dense"}}, or another kind'
        )
    patterns, layer = _parse(json.dumps(table)), getattr(module, "layer_idx", None)
    if len(patterns) > 1 and not isinstance(layer, int):
        raise UserError(
            f"attention.layers has a pattern per layer, but {type(module).__name__} has no "
            "layer_idx: use one pattern for all layers"
        )
    pattern = patterns[(layer or 0) % len(patterns)]
    all_heads = getattr(config, "num_attention_heads", heads)
    if heads != all_heads and isinstance(pattern, Dilated) and max(pattern.dilation_rates) > 1:
        raise UserError(
            f"a dilated pattern depends on the index of a head, but this rank has {heads} of "
            f"{all_heads} heads: load the model without tp_plan"
        )
    return pattern


@lru_cache(maxsize=64)
def _parse(table: str) -> tuple[Pattern, ...]:
    """The patterns that layers have in turn, of a config's table, given as JSON."""
    attention, problems = read_attention(json.loads(table))
    if problems:
        raise UserError("\n    ".join(["cannot use the pattern in the config:", *problems]))
    return patterns_of(attention, len(attention.cycle))


def _refused(name: str, given: str = "") -> UserError:
    value = f" = {given}" if given else ""
    hint = HINTS.get(name, 'use attn_implementation="eager"')
    return UserError(f'{name}{value} is not supported by attn_implementation="{NAME}": {hint}')


if "q_offset" not in inspect.signature(sdpa_mask).parameters:
    raise ImportError("longspan.hf needs a newer transformers; it is tested with 5.22")
AttentionInterface.register(NAME, longspan_attention)
AttentionMaskInterface.register(NAME, longspan_mask)

"""Code, docs and tests use the words of PyTorch, Megatron, DeepSpeed and Hugging Face."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_docs import ROOT, TABLES

PRIVATE_WORDS = {
    r"no longer a number|\bis no number|\bno numbers?\b": "NaN, non-finite",
    r"\bin passing\b|\bpassing_bytes\b": "transient buffers, peak workspace",
    r"\btravel(s|led|ling)?\b": "is communicated, is sent, is received",
    r"rematerialis|\bremat\b": "activation checkpointing, recomputation",
    r"computed again": "recomputed",
    r"wait in the CPU": "is offloaded to CPU",
    r"memory does not reach|do not reach for": "out of memory; needs at least",
    r"\bknows? no ": "does not support",
    r"\bin eights\b": "a multiple of 8",
    r"is not there yet": "is not supported with",
    r"has no use with": "has no effect with",
    r"\bsplit_norms\b": "megatron_sequence_parallel",
    r"\bchoose_way\b|(?-i:\bWay\b)": "choose_strategy, Strategy",
    r"\bis_paired\b|head-tail pairs?": "zigzag",
    r"\bby_heads\b": "ulysses",
    r"\blisted_kernels?\b": "block_sparse_kernels",
    r"\bjoin_parts?\b": "merge_partials",
    r"\bdef around\b|\baround:|\baround=|\.around\b": "forward_context",
    r"\bown_tokens\b": "local_tokens",
    r"(?-i:\bclass Placement\b|(?<!tensor\.)\bPlacement\()": "a mesh and apply_* functions",
    r"parallel[./]placement\b": "parallel.mesh, parallel.apply",
    r"\bcheckpoint\.asynchronous\b|^asynchronous =": "checkpoint.async_save",
    r"\bbad_steps\b": "max_skipped_steps",
    r"\bhang_s\b": "hang_timeout_s",
    r"\btrain\.spike\b|^spike =": "grad_norm_spike",
    r"\btrain\.clip\b|^clip =": "grad_clip",
    r"\btrain\.initial\b|^initial =": "init_from",
    r"\bmodel\.tied\b|^tied =": "tie_embeddings",
    r"\blayout\.compress\b|^compress =": "gradient_compression",
    r"\battention\.sparsity\b|^sparsity =": "density",
    r"\btrain\.(warmup|decay)\b": "train.warmup_steps, train.decay_steps",
    r"\bmin_lr\b": "min_lr_ratio",
    r"\bdeepspeed_json\b": "deepspeed_config",
    r"\boffload_parameters\b": "offload_param",
}
"""Words that have a name in the field, as case-insensitive patterns, and what to write instead."""

FIELD_WORDS = (
    "activation checkpointing",
    "context parallel",
    "mixed precision",
    "gradient accumulation",
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "KV cache",
    "NaN",
    "MFU",
)
"""Words that people search for."""

SUFFIXES = {".py", ".md", ".toml"}
FOLDERS = ("src", "docs", "examples", "tests")
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]


def texts() -> list[Path]:
    found = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
    return [*PAGES, *sorted(p for p in found if p.suffix in SUFFIXES and p != Path(__file__))]


def private_words(text: str) -> list[tuple[int, str, str]]:
    """Return line, private word and what to write instead for each private word in `text`."""
    found = []
    for pattern, instead in PRIVATE_WORDS.items():
        for match in re.finditer(pattern, text, re.IGNORECASE | re.MULTILINE):
            found.append((text.count("\n", 0, match.start()) + 1, match.group(), instead))
    return sorted(found)


def test_no_private_word_stands_for_a_word_of_the_field() -> None:
    lines = [
        f"{path.relative_to(ROOT)}:{line}: {word!r}: write {instead}"
        for path in texts()
        for line, word, instead in private_words(path.read_text())
    ]
    assert not lines, "\n".join(["private words:", *lines])


def test_private_words_are_found() -> None:
    text = "The loss\nis no longer a number.\nasynchronous = true\n"
    assert private_words(text) == [
        (2, "no longer a number", "NaN, non-finite"),
        (3, "asynchronous =", "checkpoint.async_save"),
    ]
    assert private_words("Placement = torch.distributed.tensor.Placement") == []


@pytest.mark.parametrize(
    ("key", "text"),
    [
        pytest.param(key, field.description, id=f"{name}.{key}")
        for name, section in TABLES.items()
        for key, field in section.model_fields.items()
    ],
)
def test_the_description_of_a_key_is_a_sentence(key: str, text: str | None) -> None:
    assert text is not None, f"{key} has no description"
    words = text.split()
    assert re.match(r'[A-Z"`]', text), f"{key}: start with a capital letter: {text}"
    assert text.endswith("."), f"{key}: end with a full stop: {text}"
    assert len(words) >= 4, f"{key}: use at least four words: {text}"


@pytest.mark.parametrize("word", FIELD_WORDS)
def test_words_that_people_search_for_are_in_the_docs(word: str) -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    pattern = re.compile(rf"\b{re.escape(word)}", 0 if word.isupper() else re.IGNORECASE)
    assert any(pattern.search(" ".join(page.read_text().split())) for page in pages), (
        f"{word!r} is in neither README.md nor docs/"
    )

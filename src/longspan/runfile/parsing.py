"""Makes a `Run` of a run file and overrides, and reports all its problems at once."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from longspan import presets
from longspan.builtin import follow, read_builtin
from longspan.config import (
    AUTO,
    AXES,
    DILATED,
    DILATED_KEYS,
    SECTIONS,
    Data,
    Model,
    Run,
    Section,
    Train,
)
from longspan.errors import UserError
from longspan.from_folder import fill_from_folder, folder_key
from longspan.progress import loading
from longspan.rules import Problem, check_rules
from longspan.runfile.epochs import with_steps
from longspan.runfile.explaining import (
    explain,
    render,
    suggest,
    suggest_section,
    without_wrong_keys,
)
from longspan.runfile.reading import Keys, apply_overrides, parse_override, read_tables
from longspan.vocabulary import is_folder, rounded_vocab, vocab_of_sources

ONE_PROCESS = [
    *[f"layout.{axis}=1" for axis in AXES],
    "layout.gradient_compression=none",
    "layout.offload=false",
    "engine.name=native",
]
"""Overrides that make any run a run of one process."""


def load_run(
    path: str | Path | None = None,
    overrides: Iterable[str] = (),
    *,
    builtin: str = "cpu",
    world: int | None = 1,
    hardware: str | None = None,
) -> Run:
    """Load the run file `path`, or the built-in run `builtin`, with section.key=value overrides.

    The layout is checked for `world` processes; None skips that check. `layout = "auto"` becomes
    the layout for `world` devices of this machine, or of the GPU `hardware`, a name in the table or
    a TOML file; without a world it stays unresolved.
    """
    name = str(path) if path else f'built-in run "{builtin}"'
    base = read_tables(Path(path)) if path else read_builtin(builtin)
    changes = dict(map(parse_override, overrides))
    if path is None and changes.get(("model", "factory")):  # a built-in run is one of the decoder
        base = {"train": {"device": base["train"].get("device", "auto")}}
    tables = apply_overrides(_without_other(base, changes), changes)
    if path is None:
        given = {".".join(keys) for keys in changes}
        _drop_builtin_model(tables, given)
        tables = follow(tables, given, world)
    replaced = {
        (section, key): table[key]
        for section, key, *_ in (keys for keys in changes if len(keys) > 1)
        if isinstance(table := base.get(section), dict) and key in table
    }
    return parse_run(tables, name, world=world, replaced=replaced, hardware=hardware)


def _without_other(base: dict[str, Any], changes: Collection[Keys]) -> dict[str, Any]:
    """`base` without those keys of [train] in whose place another is overridden."""
    if not isinstance(train := base.get("train"), Mapping):
        return base
    replaced = set()
    for pair in ({"steps", "epochs"}, {"global_batch", "global_batch_tokens"}):
        if len(given := {key for key in pair if ("train", key) in changes}) == 1:
            replaced |= pair - given
    return {**base, "train": {key: x for key, x in train.items() if key not in replaced}}


def parse_run(
    tables: Mapping[str, Any],
    name: str = "run",
    *,
    world: int | None = 1,
    replaced: Mapping[tuple[str, str], Any] | None = None,
    hardware: str | None = None,
) -> Run:
    """Validate plain tables into a Run, or raise one UserError that lists every problem.

    `replaced`: what the overridden keys, as (section, key), would be without the overrides.
    `world` and `hardware`: see `load_run`.
    """
    is_auto = tables.get("layout") == AUTO
    if is_auto:
        tables = {**tables, "layout": {}}
    train = tables.get("train")
    has_auto_chunks = isinstance(train, Mapping) and train.get("chunk_tokens") == AUTO
    if has_auto_chunks:
        assert isinstance(train, Mapping)
        tables = {**tables, "train": {**train, "chunk_tokens": 0}}
    problems = _problems_of_factory(tables)
    if problems is None:
        tables, folder, problems = fill_from_folder(dict(tables))
        tables = _fill_vocab(_fill_branches(tables))
    else:
        folder = None
    problems += [
        Problem(key, f"unknown section{suggest_section(key)}")
        for key in tables
        if key not in SECTIONS
    ]
    sections: dict[str, Section] = {}
    for key, section in SECTIONS.items():
        table = tables.get(key, {})
        if isinstance(table, Mapping):
            unknown = [field for field in table if field not in section.model_fields]
            problems += [
                Problem(f"{key}.{field}", f"unknown key{suggest(field, key)}") for field in unknown
            ]
            table = {field: table[field] for field in table if field not in unknown}
        try:
            sections[key] = section.model_validate(table)
        except ValidationError as error:
            # An error in a key that was not given follows from one in a key that was.
            details = [d for d in error.errors() if not d["loc"] or d["loc"][0] in table]
            otherwise = without_wrong_keys(key, table, details, replaced or {})
            problems += [explain(key, detail, otherwise, replaced or {}) for detail in details]
    if has_auto_chunks and isinstance(parsed := sections.get("train"), Train):
        sections["train"] = parsed.with_chunks(None)
    problems += _fill_batch(sections, tables)
    problems += _fill_steps(sections, tables)
    problems += check_rules(sections, None if is_auto else world)
    if folder and isinstance(model := sections.get("model"), Model):
        differing = folder.disagreements(model, folder_key(tables))
        problems += [Problem(path, text) for path, text in differing.items()]
    if problems:
        raise UserError(render(name, problems))
    run = Run(**sections)  # type: ignore[arg-type]
    if is_auto:
        run = _with_layout(run, world, hardware)
    return _with_chunks(run, world, hardware) if run.train.has_auto_chunks else run


def _fill_batch(sections: dict[str, Section], tables: Mapping[str, Any]) -> list[Problem]:
    """Give a [train] with tokens per step the global batch of so many; return why it has none."""
    train, data = sections.get("train"), sections.get("data")
    if not isinstance(train, Train) or not isinstance(data, Data):
        return []
    if (tokens := train.global_batch_tokens) is None:
        return []
    key, model = "train.global_batch_tokens", sections.get("model")
    if "global_batch" in tables["train"]:
        return [Problem(key, "and train.global_batch exclude each other: remove one of them")]
    if isinstance(model, Model) and model.factory:
        message = "is not supported with model.factory, whose samples may have no tokens"
        return [Problem(key, f"{message}: set train.global_batch")]
    if tokens % data.context:
        above = -(-tokens // data.context) * data.context
        message = f"{tokens} is not a multiple of data.context = {data.context}: use {above}"
        return [Problem(key, message)]
    batch = tokens // data.context
    sections["train"] = train.model_copy(update={"global_batch": batch})
    return []


def _fill_steps(sections: dict[str, Section], tables: Mapping[str, Any]) -> list[Problem]:
    """Give a [train] with epochs the steps that they take; return why it has none."""
    train, data, model = (sections.get(key) for key in ("train", "data", "model"))
    if not isinstance(train, Train) or train.epochs is None:
        return []
    if "steps" in tables["train"]:
        return [Problem("train.epochs", "and train.steps exclude each other: remove one of them")]
    if isinstance(data, Data) and isinstance(model, Model):
        try:
            sections["train"] = with_steps(train, data, model)
        except UserError as error:
            return [Problem("train.epochs", str(error))]
    return []


def _with_layout(run: Run, world: int | None, hardware: str | None) -> Run:
    """The run with the layout that "auto" stands for."""
    if world is None:
        return run.model_copy(update={"layout": run.layout.taken_for("")})
    with loading(quiet=os.environ.get("RANK", "0") != "0"):
        from longspan.planning.auto import choose_layout  # which imports torch

    return choose_layout(run, world, hardware)


def _with_chunks(run: Run, world: int | None, hardware: str | None) -> Run:
    """The run with the chunks that "auto" stands for."""
    if world is None:
        return run
    with loading(quiet=os.environ.get("RANK", "0") != "0"):
        from longspan.planning.auto import choose_chunks

    return choose_chunks(run, world, hardware)


def dump_run(run: Run) -> str:
    """Return the run as TOML with all defaults written out; unset optional keys are omitted.

    With `model.factory`, so are the keys that have no effect then.
    """
    tables = run.model_dump(mode="json", exclude_none=True)
    if run.model.factory:
        tables |= {"model": {"factory": run.model.factory}}
        tables |= {"data": {key: tables["data"][key] for key in FACTORY_DATA_KEYS}}
        del tables["attention"]
    if run.layout.is_unresolved:
        tables["layout"] = AUTO
    if run.train.has_auto_chunks:
        tables["train"]["chunk_tokens"] = AUTO
    tables["train"].pop("epochs", None)  # the steps are known now, without the data
    for key in ("epochs", "global_batch_tokens"):  # of which steps and global_batch follow
        tables["train"].pop(key, None)
    return tomli_w.dumps(tables)


FACTORY_DATA_KEYS = ("accept_changed",)
"""The keys of [data] that hold for the dataset of a user's own task."""


def _problems_of_factory(tables: Mapping[str, Any]) -> list[Problem] | None:
    """Return the keys that have no effect with `model.factory`; None without it."""
    model = tables.get("model")
    if not isinstance(model, Mapping) or not model.get("factory"):
        return None
    allowed = {
        "model": ("factory",),
        "attention": (),
        "data": FACTORY_DATA_KEYS,
    }
    return [
        Problem(f"{section}.{key}", "has no effect with model.factory: remove it")
        for section, keys in allowed.items()
        if isinstance(table := tables.get(section, {}), Mapping)
        for key in table
        if key in SECTIONS[section].model_fields and key not in keys
    ]


def _fill_branches(tables: dict[str, Any]) -> dict[str, Any]:
    """Give a dilated [attention] without branches those that fit the model preset and context."""
    model, attention, data = (tables.get(key, {}) for key in ("model", "attention", "data"))
    if not all(isinstance(table, Mapping) for table in (model, attention, data)):
        return tables
    layers = attention.get("layers") or [{}]
    layers = layers if isinstance(layers, list | tuple) else [{}]
    needs_branches = any(
        {"kind": "dilated", **attention, **layer}["kind"] in DILATED
        and not set(DILATED_KEYS) & {*attention, *layer}
        for layer in layers
        if isinstance(layer, Mapping)
    )
    if not needs_branches:
        return tables
    try:
        context = Data.model_validate({"context": data.get("context", Data().context)}).context
    except ValidationError:  # reported by itself, not by branches that it does not have
        context = Data().context
    segment = presets.SEGMENTS.get(str(model.get("preset", "tiny")), presets.SEGMENTS["tiny"])
    lengths, rates = presets.branches(segment, context)
    branches = {"segment_lengths": lengths, "dilation_rates": rates}
    return {**tables, "attention": {**branches, **attention}}


def _fill_vocab(tables: dict[str, Any]) -> dict[str, Any]:
    """Give a [model] without vocab that of the tokenizer of the data, if it is there to be read."""
    model, data = tables.get("model", {}), tables.get("data", {})
    if not isinstance(model, Mapping) or not isinstance(data, Mapping) or "vocab" in model:
        return tables
    vocab = vocab_of_sources(_sources(data))
    if vocab is None:
        return tables
    return {**tables, "model": {**model, "vocab": rounded_vocab(vocab)}}


def _sources(data: Mapping[str, Any]) -> list[object]:
    """The sources that a [data] names, which may be wrong."""
    mix = data.get("mix")
    if not isinstance(mix, list):
        return [data.get("source")]
    return [part.get("source") for part in mix if isinstance(part, Mapping)]


def _drop_builtin_model(tables: dict[str, Any], given: Collection[str]) -> None:
    """Remove what a built-in run says of its model and documents if other data decides that.

    Keys in `given` (section.key) are the user's and stay.
    """
    model, data = tables.get("model"), tables.get("data")
    if not (isinstance(model, dict) and isinstance(data, dict)):
        return
    has_folders = any(map(is_folder, _sources(data)))
    if (has_folders or "data.mix" in given) and "data.documents" not in given:
        data.pop("documents", None)
    if folder_key(tables):
        for section in ("model", "attention"):
            if isinstance(table := tables.get(section), dict):
                for key in [key for key in table if not _is_given(f"{section}.{key}", given)]:
                    del table[key]
    elif "model.vocab" not in given:
        has_own = "family" in presets.MODELS.get(str(model.get("preset")), {})
        if has_own or has_folders:
            model.pop("vocab", None)


def _is_given(path: str, given: Collection[str]) -> bool:
    return any(key == path or key.startswith(f"{path}.") for key in given)

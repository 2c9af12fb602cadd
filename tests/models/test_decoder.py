"""The decoder: parameter counts, causality, initialisation, KV cache."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from longspan.config import Model
from longspan.costs import count_parameters, linear_costs, linear_sizes
from longspan.models import build_decoder, new_decoder
from longspan.models.decoder import Decoder
from longspan.parallel.dtensor import to_local
from longspan.runfile import load_run, parse_run
from longspan.sketching import report
from tests.harness import Ranks
from tests.steps import open_state

TINY = ["model.hidden=32", "model.heads=4", "data.context=64"]


@pytest.mark.parametrize(
    ("preset", "low", "high"),
    [
        ("tiny", 0.3e6, 0.6e6),
        ("125m", 120e6, 130e6),
        ("350m", 345e6, 365e6),
        ("1.3b", 1.27e9, 1.33e9),
        ("7b", 6.7e9, 7.1e9),
        ("13b", 12.8e9, 13.4e9),
        ("65b", 64e9, 66e9),
        ("70b", 69e9, 71e9),
        ("175b", 173e9, 177e9),
    ],
)
def test_presets_have_the_size_in_their_name(preset: str, low: float, high: float) -> None:
    model = Model.model_validate({"preset": preset})
    count = count_parameters(model)
    assert low < count < high
    # Published formula: 3hf + (2 + 2k/a)h² and 2 norms per layer, the embeddings and a last norm.
    h, f, layers = model.hidden, model.ffn, model.layers
    k, a = model.kv_heads, model.heads
    formula = layers * (3 * h * f + (2 * a + 2 * k) * h * h // a + 2 * h) + h
    formula += (1 if model.tie_embeddings else 2) * model.vocab * h
    assert count == formula


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["model.preset=13b"],
        ["model.kv_heads=2", "model.tie_embeddings=false", "model.sub_layer_norm=true"],
        ["model.linear=low_rank", "model.sketch.keep=0.3", "model.sketch.layers=blocks.1.*"],
        ["model.linear=sketched", "model.sketch.terms=2", "model.sub_layer_norm=true"],
    ],
)
def test_the_counted_parameters_are_those_of_the_model(options: list[str]) -> None:
    run = load_run(None, [*TINY, *options] if "13b" not in str(options) else options, world=None)
    assert count_parameters(run.model) == sum(p.numel() for p in new_decoder(run).parameters())


@pytest.mark.parametrize(
    "options",
    [[], ["model.tie_embeddings=false"], ["model.kv_heads=2"], ["model.sub_layer_norm=true"]],
    ids=["plain", "untied", "grouped-query", "sub-layer-norm"],
)
def test_loss_equals_the_cross_entropy_of_the_logits(options: list[str]) -> None:
    run = load_run(None, [*TINY, *options])
    model = build_decoder(run, torch.device("cpu"))
    tokens, targets = torch.randint(256, (2, 2, 50)).unbind()
    logits = model(tokens)
    torch.testing.assert_close(logits, model.hidden(tokens) @ model.head_weight.T)
    expected = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(model(tokens, targets), expected)
    torch.testing.assert_close(model.next_logits(tokens), logits[:, -1])
    model(tokens, targets).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def logits_of_a_layout(rank: int, world: int, options: list[str]) -> Tensor:
    run = load_run(None, [*TINY, *options], world=world)
    tokens, targets = torch.randint(
        256, (2, 2, 50), generator=torch.Generator().manual_seed(0)
    ).unbind()
    with open_state(run, rank, world) as (state, _):
        model = state.engine.module
        grads = []
        for from_logits in (False, True):
            if from_logits:
                logits = model(tokens)
                loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            else:
                loss = model(tokens, targets)
            loss.backward()
            grads.append([to_local(p.grad).clone() for p in model.parameters()])
            model.zero_grad()
        for from_loss, through_logits in zip(*grads, strict=True):
            torch.testing.assert_close(through_logits, from_loss)
    return logits.detach()


@pytest.mark.parametrize(
    "options",
    [
        ["layout.tensor=2"],
        ["layout.tensor=2", "layout.megatron_sequence_parallel=true"],
        ["layout.tensor=2", "model.linear=low_rank"],
        ["layout.zero=3", "train.global_batch=2"],
        ["layout.replicate=2", "layout.shard=1", "train.global_batch=2"],
    ],
    ids=lambda options: "-".join(options),
)
def test_every_rank_has_the_logits_and_their_gradients(ranks: Ranks, options: list[str]) -> None:
    single = [option for option in options if not option.startswith("layout.")]
    model = build_decoder(load_run(None, [*TINY, *single]), torch.device("cpu"))
    tokens = torch.randint(256, (2, 2, 50), generator=torch.Generator().manual_seed(0))[0]
    for logits in ranks.run(logits_of_a_layout, 2, options):
        torch.testing.assert_close(logits, model(tokens).detach(), rtol=1e-4, atol=1e-5)


def pipeline_without_targets(rank: int, world: int) -> None:
    run = load_run(None, [*TINY, "layout.pipeline=2", "train.global_batch=2"], world=world)
    message = r"give targets, or set layout\.pipeline = 1"
    with open_state(run, rank, world) as (state, _), pytest.raises(ValueError, match=message):
        state.engine.module(torch.zeros(2, 64, dtype=torch.int64))


def test_a_pipeline_refuses_to_give_logits(ranks: Ranks) -> None:
    ranks.run(pipeline_without_targets, 2)


@pytest.mark.parametrize(
    "attention",
    [
        ["attention.kind=dense"],
        ["attention.kind=dilated"],
        ["attention.kind=block_sparse", "attention.block_size=8", "attention.density=0.5"],
        ["attention.kind=dilated_block_sparse", "attention.block_size=4", "attention.stride=2"],
    ],
)
def test_outputs_do_not_depend_on_future_tokens(attention: list[str]) -> None:
    model = build_decoder(load_run(None, [*TINY, *attention]), torch.device("cpu"))
    tokens = torch.randint(256, (1, 60))
    changed = tokens.clone()
    changed[:, 41:] = torch.randint(256, (1, 19))
    before, after = model.hidden(tokens), model.hidden(changed)
    assert torch.equal(before[:, :41], after[:, :41])
    assert not torch.equal(before[:, 41:], after[:, 41:])


def test_initial_weights_depend_only_on_seed_and_name() -> None:
    def weights(*overrides: str) -> dict[str, torch.Tensor]:
        run = load_run(None, [*TINY, *overrides])
        return build_decoder(run, torch.device("cpu")).state_dict()

    small, deep, other = weights(), weights("model.layers=3"), weights("train.seed=1")
    assert torch.equal(small["embedding.weight"], deep["embedding.weight"])
    assert torch.equal(small["blocks.1.mlp.up.weight"], deep["blocks.1.mlp.up.weight"])
    assert not torch.equal(small["embedding.weight"], other["embedding.weight"])
    assert not torch.equal(small["blocks.0.mlp.up.weight"], small["blocks.1.mlp.up.weight"])


def test_initial_weights_have_the_published_std() -> None:
    def std(name: str, **model: object) -> float:
        run = parse_run({"model": {"hidden": 256, "heads": 4, "layers": 2, **model}})
        weights = build_decoder(run, torch.device("cpu")).state_dict()
        return float(weights[name].std())

    small = math.sqrt(2 / (5 * 256))
    assert std("blocks.0.attention.query.weight") == pytest.approx(small, rel=0.02)
    assert std("blocks.0.attention.out.weight") == pytest.approx(small / 2, rel=0.02)
    xavier = math.sqrt(2 / (256 + 256))
    gain = math.sqrt(math.log(4))
    magneto = {"sub_layer_norm": True}
    assert std("blocks.0.attention.query.weight", **magneto) == pytest.approx(xavier, rel=0.02)
    assert std("blocks.1.attention.out.weight", **magneto) == pytest.approx(gain * xavier, rel=0.02)


def test_sub_layer_norm_precedes_the_output_projections() -> None:
    model = build_decoder(load_run(None, [*TINY, "model.sub_layer_norm=true"]), torch.device("cpu"))
    names = dict(model.named_parameters())
    assert "blocks.0.attention.norm.weight" in names
    assert names["blocks.0.mlp.norm.weight"].shape == names["blocks.0.mlp.down.weight"].shape[1:]
    plain: Decoder = build_decoder(load_run(None, TINY), torch.device("cpu"))
    assert "blocks.0.attention.norm.weight" not in dict(plain.named_parameters())


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["attention.kind=dense"],
        ["model.kv_heads=1"],
        ["attention.kind=block_sparse", "attention.block_size=4", "attention.density=0.3"],
        ["attention.kind=dilated_block_sparse", "attention.block_size=2", "attention.stride=2"],
        [
            "model.layers=4",
            "model.learnable_sinks=true",
            'attention.layers=[{kind="window",window=9,sinks=2,repeat=3},{}]',
        ],
    ],
)
def test_decoding_with_the_kv_cache_equals_the_full_forward(options: list[str]) -> None:
    branches = ["attention.segment_lengths=[8,32]", "attention.dilation_rates=[1,4]"]
    chosen = [
        *TINY,
        *([] if any("=dense" in x or "=block_sparse" in x for x in options) else branches),
        *options,
    ]
    model = build_decoder(load_run(None, chosen), torch.device("cpu")).double()
    tokens = torch.randint(256, (2, 70))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
        expected = model.hidden(tokens)
        caches = model.new_caches(70)
        outputs = [model.hidden(tokens[:, :9], caches)]
        outputs += [model.hidden(tokens[:, i : i + 1], caches) for i in range(9, 60)]
        outputs.append(model.hidden(tokens[:, 60:], caches))
    torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["model.linear=low_rank", "model.sketch.keep=0.3"],
        ["model.linear=sketched", "model.sketch.terms=2", "model.kv_heads=2"],
        ["model.linear=sketched", 'model.sketch.ranks={"*.up"=5, "blocks.1.*"=0}'],
    ],
    ids=["dense", "low rank", "sketched", "ranks"],
)
@pytest.mark.filterwarnings("ignore:SKLinear .* computes")
def test_linear_costs_of_the_config_equal_those_of_the_model(options: list[str]) -> None:
    run = load_run(None, [*TINY, *options])
    found = report(new_decoder(run))
    assert linear_costs(run.model) == (found.before, found.after)
    assert {row.name.split(".", 2)[2] for row in found.rows} == set(linear_sizes(run.model))


@torch.no_grad()
def test_factored_layers_are_initialised_with_the_variance_of_dense_ones() -> None:
    wide = ["model.hidden=256", "model.ffn=512", "model.heads=4"]
    for extra in ([], ["model.sub_layer_norm=true"]):
        dense = build_decoder(load_run(None, [*TINY, *wide, *extra]), torch.device("cpu"))
        for linear in ("sketched", "low_rank"):
            options = [*TINY, *wide, *extra, f"model.linear={linear}", "model.sketch.keep=0.4"]
            model = build_decoder(load_run(None, options), torch.device("cpu"))
            for name in linear_sizes(Model()):
                layers = (m.get_submodule(f"blocks.0.{name}") for m in (model, dense))
                ours, plain = (float(x.weight.std()) for x in layers)  # type: ignore[operator]
                assert abs(ours / plain - 1) < 0.05, (linear, name)

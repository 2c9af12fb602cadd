"""transformers with attn_implementation="longspan" computes what the oracle does."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longspan.attention import attend_oracle, patterns_of
from longspan.cli import main
from longspan.config import Attention
from longspan.trained import load_trained
from longspan.training import train
from tests.parallel.test_apply import run_of

transformers = pytest.importorskip("transformers")
import longspan.hf  # noqa: E402

DILATED = {"kind": "dilated", "segment_lengths": [8, 32], "dilation_rates": [1, 4]}
KINDS: dict[str, dict[str, Any]] = {
    "dense": {"kind": "dense"},
    "dilated": DILATED,
    "layers": {
        "segment_lengths": [8, 32],
        "dilation_rates": [1, 2],
        "layers": [{"kind": "window", "window": 7, "sinks": 2}, {"kind": "dilated"}],
    },
    "block_sparse": {"kind": "block_sparse", "block_size": 4, "local_window": 8, "stride": 3},
    "blocks": {**DILATED, "kind": "dilated_block_sparse", "block_size": 2, "global_tokens": 2},
}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": None,
}


def new_model(family: str = "Llama", attention: Any = DILATED, **fields: Any) -> Any:
    """A random causal model in float64, in eval mode."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        **{**SIZES, "longspan": {"attention": attention}, "attn_implementation": "longspan"},
        **fields,
    )
    return getattr(transformers, f"{family}ForCausalLM")(config).double().eval()


def new_tokens(batch: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, 64, (batch, count), generator=generator)


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Registers attn_implementation="oracle"; the dict holds further arguments of the oracle."""
    options: dict[str, Any] = {}

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Any, **given: Any
    ) -> tuple[Tensor, None]:
        config: Any = module.config
        attention = Attention.model_validate(config.longspan["attention"])
        pattern = patterns_of(attention, config.num_hidden_layers)[module.layer_idx]
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return attend_oracle(q, k, v, pattern, scale=given["scaling"], **options), None

    functions = transformers.AttentionInterface._global_mapping
    monkeypatch.setitem(functions, "oracle", attention)
    masks = transformers.AttentionMaskInterface._global_mapping
    monkeypatch.setitem(masks, "oracle", lambda **_: None)
    return options


def logits_and_gradients(model: Any, tokens: Tensor, **inputs: Any) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    logits = model(tokens, **inputs).logits
    logits.square().sum().backward()
    return logits.detach(), [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("family", "kind"),
    [*[("Llama", kind) for kind in KINDS], ("Qwen3", "dilated"), ("Mistral", "blocks")],
)
def test_logits_and_gradients_are_those_of_the_oracle(
    oracle: dict[str, Any], family: str, kind: str
) -> None:
    fields = {"Mistral": {"sliding_window": None}, "Qwen3": {"head_dim": 8}}.get(family, {})
    model, tokens = new_model(family, KINDS[kind], **fields), new_tokens(2, 45)
    found = logits_and_gradients(model, tokens)
    model.set_attn_implementation("oracle")
    expected = logits_and_gradients(model, tokens)
    # Norms and RoPE of transformers are float32 in a float64 model too.
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    if kind != "dense":
        model.set_attn_implementation("eager")
        assert not torch.allclose(model(tokens).logits, expected[0], atol=1e-2)


def test_the_dense_pattern_equals_eager_attention() -> None:
    """Up to its softmax, which is float32 in any dtype: in float64 they differ by 4e-6 as well."""
    model, tokens = new_model(attention={"kind": "dense"}), new_tokens(2, 21)
    found = logits_and_gradients(model, tokens)
    model.set_attn_implementation("eager")
    expected = logits_and_gradients(model, tokens)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=5e-6)


def test_sinks_and_layers_are_those_of_gpt_oss() -> None:
    """Learnable sinks, and windows in every other layer: logits and all gradients."""
    fields = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8, "sliding_window": 9}
    layers = [{"kind": "window", "window": 9}, {"kind": "dense"}]
    model = new_model("GptOss", {"kind": "dense", "layers": layers}, **fields).float()
    tokens = new_tokens(2, 33)
    model.set_attn_implementation("eager")
    expected = logits_and_gradients(model, tokens)
    model.set_attn_implementation("longspan")
    with pytest.raises(ValueError, match=r"sliding_window = 9 is not supported"):
        model(tokens)
    for module in (model, *model.modules()):
        if hasattr(module, "sliding_window"):
            module.sliding_window = 33 if module.sliding_window else None
    model.config.sliding_window = 33
    found = logits_and_gradients(model, tokens)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    sinks = model.model.layers[0].self_attn.sinks
    assert sinks.grad.abs().max() > 1e-3


def test_under_autocast_all_is_cast_as_for_torchs_attention() -> None:
    """The rotary embeddings of some versions of transformers leave q and k in float32."""
    layer = new_model(attention=KINDS["dilated"]).model.layers[0].self_attn
    q, k, v = (torch.randn(2, 4, 45, 8) for _ in range(3))
    mask = torch.zeros(2, 45, 1, 1, dtype=torch.int64)
    mask[0, :7] = -1  # one row is padded
    for given in (None, mask):
        with torch.autocast("cpu", torch.bfloat16):
            found, _ = longspan.hf.longspan_attention(layer, q, k, v.bfloat16(), given)
        rounded = (x.bfloat16() for x in (q, k, v))
        expected, _ = longspan.hf.longspan_attention(layer, *rounded, given)
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, expected)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", KINDS)
def test_token_by_token_equals_the_full_forward(kind: str, cache: str) -> None:
    model, prompt = new_model(attention=KINDS[kind]), new_tokens(2, 13)
    found = model.generate(
        prompt,
        max_new_tokens=24,
        do_sample=False,
        cache_implementation=cache,
        return_dict_in_generate=True,
        output_logits=True,
        disable_compile=True,
    )
    with torch.no_grad():
        expected = model(found.sequences).logits[:, 12:-1]
    assert torch.equal(found.sequences[:, 13:], expected.argmax(-1))
    # `generate` returns logits in float32.
    torch.testing.assert_close(torch.stack(found.logits, 1), expected.float(), rtol=0, atol=1e-6)


def test_several_tokens_at_a_time_equal_the_full_forward() -> None:
    model, tokens = new_model(), new_tokens(2, 40)
    cache, logits = transformers.DynamicCache(config=model.config), []
    for part in tokens.split([7, 1, 20, 12], dim=1):
        logits.append(model(part, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(logits, 1), model(tokens).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_batch_equals_its_rows_alone(kind: str) -> None:
    """Left and right padding, in training and in decoding."""
    model, tokens = new_model(attention=KINDS[kind]), new_tokens(4, 33)
    extents = [(9, 33), (0, 33), (9, 33), (3, 20)]
    mask = torch.zeros(4, 33, dtype=torch.int64)
    for row, (start, stop) in enumerate(extents):
        mask[row, start:stop] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    padded = tokens * mask
    logits = model(padded, attention_mask=mask, position_ids=positions).logits
    (logits.square() * mask[:, :, None]).sum().backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for row, (start, stop) in enumerate(extents):
        alone = model(tokens[row : row + 1, start:stop]).logits
        torch.testing.assert_close(logits[row, start:stop], alone[0], rtol=0, atol=1e-6)
        alone.square().sum().backward()
    torch.testing.assert_close(found, [p.grad for p in model.parameters()], rtol=1e-6, atol=1e-6)
    options = {"max_new_tokens": 12, "do_sample": False}
    generated = model.generate(padded[:3], attention_mask=mask[:3], **options)
    for row in (0, 1):
        start, _ = extents[row]
        alone = model.generate(tokens[row : row + 1, start:], **options)
        assert torch.equal(generated[row, start:], alone[0])


def test_positions_that_start_again_mark_documents(oracle: dict[str, Any]) -> None:
    model, tokens = new_model(), new_tokens(2, 30)
    positions = torch.cat([torch.arange(11), torch.arange(12), torch.arange(7)]).expand(2, -1)
    found = logits_and_gradients(model, tokens, position_ids=positions, use_cache=False)
    oracle["documents"] = torch.tensor([0] * 11 + [1] * 12 + [2] * 7).expand(2, -1)
    model.set_attn_implementation("oracle")
    expected = logits_and_gradients(model, tokens, position_ids=positions, use_cache=False)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_dropout_follows_the_random_state_and_activation_checkpointing_repeats_it() -> None:
    model, tokens = new_model(attention_dropout=0.5).train(), new_tokens(2, 20)
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        torch.manual_seed(3)
        results.append(logits_and_gradients(model, tokens, use_cache=False))
    torch.testing.assert_close(results[0], results[1])
    assert not torch.allclose(model(tokens, use_cache=False).logits, results[0][0])
    model.eval()
    assert torch.equal(model(tokens).logits, model(tokens).logits)


def test_what_a_trainer_passes_is_not_refused() -> None:
    model, tokens = new_model(), new_tokens(2, 12)
    count = torch.tensor(2 * 11)
    found = model(tokens, labels=tokens, num_items_in_batch=count, use_cache=False)
    torch.testing.assert_close(found.loss, model(tokens, labels=tokens).loss)


def test_what_is_not_supported_is_refused_by_name() -> None:
    model, tokens = new_model(), new_tokens(2, 12)
    with pytest.raises(ValueError, match="output_attentions = true is not supported by attn_imp"):
        model(tokens, output_attentions=True)
    with pytest.raises(ValueError, match=r"takes an attention_mask \(batch, tokens\), 0 for pad"):
        model(tokens, attention_mask=torch.ones(2, 1, 12, 12).tril())
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[0, 5] = 0
    with pytest.raises(ValueError, match="at the left or the right of a row, got zeros between"):
        model(tokens, attention_mask=mask)
    model.config.is_causal = False
    with pytest.raises(ValueError, match="a mask that is not causal is not supported"):
        model(tokens)
    with pytest.raises(ValueError, match=r"sliding_window = 8 .* set config\.sliding_window = N"):
        new_model("Mistral", sliding_window=8)(tokens)

    module = new_model().model.layers[0].self_attn
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    for name in ("softcap", "position_bias", "cache", "cu_seq_lens_q", "of_tomorrow"):
        with pytest.raises(ValueError, match=f"{name}.* is not supported by attn_implementation"):
            longspan.hf.longspan_attention(module, q, k, k, None, **{name: torch.ones(1)})
    with pytest.raises(ValueError, match="is_causal = false is not supported"):
        longspan.hf.longspan_attention(module, q, k, k, None, is_causal=False)
    with pytest.raises(ValueError, match="this rank has 2 of 4 heads: load the model without tp_p"):
        longspan.hf.longspan_attention(module, q[:, :2], k[:, :1], k[:, :1], None)
    with pytest.raises(ValueError, match=r"a mask function of the model \(or_mask_function"):
        longspan.hf.longspan_mask(1, 3, 3, use_vmap=True)
    with pytest.raises(ValueError, match="a KV cache that drops keys is not supported"):
        longspan.hf.longspan_mask(1, 1, 3, q_offset=8, kv_offset=6)
    with pytest.raises(ValueError, match=r"must cover all 4 tokens, .* got \(1, 3\)"):
        longspan.hf.longspan_mask(1, 1, 4, 3, attention_mask=torch.ones(1, 3))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (None, r'has no longspan: set config\.longspan = {"attention": {"kind": "dense"}}'),
        ({"kind": "dense"}, r'longspan must be {"attention": .* got {"kind": "dense"}'),
        ({"attention": {"kind": "dens"}}, r"longspan\.attention\.kind: Input should be 'dense'"),
        ({"attention": {"kind": "dilated", "x": 1}}, r"longspan\.attention\.x: .* got 1"),
        ({"attention": {"kind": "dilated"}}, "need one entry per branch, got 0 and 0"),
        (
            {"attention": {**DILATED, "stride": 2}},
            r'longspan\.attention\.stride has no effect with .*"d',
        ),
    ],
)
def test_a_wrong_pattern_is_refused(table: Any, message: str) -> None:
    model = new_model()
    model.config.longspan = table
    with pytest.raises(ValueError, match=message):
        model(new_tokens(1, 4))


@pytest.mark.parametrize("kind", ["dense", "dilated", "dilated_block_sparse"])
def test_an_exported_run_computes_our_attention(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["train.steps=1", "train.global_batch=1", "model.kv_heads=2"]
    options += [f"attention.kind={kind}", "attention.block_size=4"]
    if kind == "dense":
        options += ["attention.segment_lengths=[]", "attention.dilation_rates=[]"]
    train(run_of(1, *options), tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    load = transformers.AutoModelForCausalLM.from_pretrained
    dense = {"attn_implementation": "longspan"} if kind == "dense" else {}
    theirs = load(tmp_path / "out", trust_remote_code=False, **dense)
    assert theirs.config._attn_implementation == "longspan"
    _, ours, _ = load_trained(tmp_path / "run")
    tokens = torch.randint(256, (2, 60))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=0, atol=1e-5)
        sdpa = load(tmp_path / "out", attn_implementation="sdpa")
        is_dense = torch.allclose(sdpa(tokens).logits, ours(tokens), rtol=0, atol=1e-5)
    assert is_dense == (kind == "dense")
    # Without longspan.hf a pattern that is not dense does not load, instead of attending densely.
    monkeypatch.delitem(transformers.AttentionInterface._global_mapping, "longspan")
    if kind != "dense":
        with pytest.raises(ValueError, match='attn_implementation="longspan"` is not supported'):
            load(tmp_path / "out")


def test_a_model_saved_by_transformers_keeps_its_pattern(tmp_path: Path) -> None:
    model = new_model()
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["longspan"] == {"attention": DILATED}


def test_without_transformers_the_import_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "longspan.hf")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"longspan\.hf needs transformers: .*longspan\[hf\]"):
        importlib.import_module("longspan.hf")

"""Predicted time of Longspan's own runs: against sums by hand and measured runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from longspan.attention import Dense, Window
from longspan.config import Run
from longspan.errors import UserError
from longspan.hardware import cpu_device, devices
from longspan.planning.collective_time import collective_s, exposed_s
from longspan.planning.communication import Traffic
from longspan.planning.fitting import quantiles
from longspan.planning.rates import RunRates, band_of, efficiencies, rates_of
from longspan.planning.run_time import attention_rate, predict
from longspan.runfile import load_run

H200 = devices()["h200"]
FREE = 1e-12
PERFECT = RunRates(
    matmul=1, half_rows=FREE, half_columns=FREE, dense=1, dilated=1, half_head_dim=FREE,
    block_traffic=FREE, loss_traffic=FREE, weight_traffic=FREE, optimizer_traffic=FREE,
    host_s=FREE, step_s=FREE, sharpness=64, link=1e6, network=1e6, link_latency_s=FREE,
    network_latency_s=FREE, bandwidth=1e9, offload_waits=FREE, graph_gaps_s=FREE,
)  # fmt: skip
SMALL = ["model.preset=125m", "model.vocab=1024", "data.context=4096", "train.micro_batch=2"]
SMALL += ["train.global_batch=16", "attention.kind=dense"]
TF32 = "train.matmul_precision=high"


def small_run(*overrides: str, world: int = 1) -> Run:
    return load_run(None, [*SMALL, *overrides], builtin="cuda", world=world)


def test_one_gpu_at_its_peak_takes_the_time_of_its_flops() -> None:
    """6 FLOPs per parameter and token, and 3.5 times the forward pass of attention."""
    tokens, hidden, ffn = 16 * 4096, 768, 2048
    products = 6 * tokens * (12 * (4 * hidden**2 + 3 * hidden * ffn) + 1024 * hidden)
    pairs = 16 * 12 * 4096 * 4097 // 2  # of 16 sequences and 12 heads
    attention = 12 * 3.5 * 4 * 64 * pairs
    found = predict(small_run(), 1, H200, PERFECT)
    assert found.step_s == pytest.approx((products + attention) / 989e12, rel=1e-6)
    assert found.tokens_per_s == pytest.approx(tokens / found.step_s)
    # MFU counts the backward pass of attention twice, and not the products that it repeats.
    assert found.mfu == pytest.approx((products + attention * 6 / 7) / (products + attention))


def test_full_checkpointing_adds_a_forward_pass_of_the_blocks() -> None:
    plain = predict(small_run(), 1, H200, PERFECT)
    full = predict(small_run("train.activation_checkpointing=full"), 1, H200, PERFECT)
    forward = plain.parts["matrix products"] / 3 + plain.parts["attention"] / 3.5
    assert full.step_s - plain.step_s == pytest.approx(forward, rel=1e-6)


def test_data_sequence_and_tensor_ranks_share_the_work_at_perfect_rates() -> None:
    one = predict(small_run(), 1, H200, PERFECT).step_s
    for axis in ("replicate", "shard", "sequence", "tensor"):
        layout = ["layout.shard=1", f"layout.{axis}=4"]
        found = predict(small_run(*layout, world=4), 4, H200, PERFECT)
        assert found.step_s == pytest.approx(one / 4, rel=1e-5), axis


def test_a_pipeline_waits_for_its_slowest_stage_and_its_bubble() -> None:
    """Twelve layers on four ranks, three each; the head of 1,024 words is on the last."""
    overrides = ["layout.shard=1", "layout.pipeline=4"]
    one = predict(small_run(), 1, H200, PERFECT)
    loss, total = one.parts["loss"] / 8, one.step_s / 8  # of one of eight micro-batches
    slowest = (total - loss) / 4 + loss
    found = predict(small_run(*overrides, world=4), 4, H200, PERFECT)
    assert found.step_s == pytest.approx((8 + 3) * slowest, rel=1e-5)
    interleaved = [*overrides, "layout.schedule=interleaved", "layout.virtual_stages=3"]
    found = predict(small_run(*interleaved, world=4), 4, H200, PERFECT)
    assert found.step_s == pytest.approx((8 + 3 / 3) * slowest, rel=1e-5)


def test_a_host_slower_than_the_device_sets_the_pace() -> None:
    slow = replace(PERFECT, host_s=1.0)
    launched = "train.cuda_graphs=false"
    found = predict(small_run(launched), 1, H200, slow)
    assert found.step_s == pytest.approx(8 * 12 * 1.0, rel=1e-2)
    eager = predict(small_run("train.compile=false", launched), 1, H200, slow)
    assert eager.step_s == pytest.approx(slow.eager_host * found.step_s, rel=1e-2)


def test_a_graph_waits_for_no_host_but_has_gaps_between_its_kernels() -> None:
    slow = replace(PERFECT, host_s=1.0, graph_gaps_s=0.5)
    found = predict(small_run(), 1, H200, slow)
    assert found.parts["gaps in graphs"] == pytest.approx(8 * 12 * 0.5)
    assert "host" not in found.parts
    split = predict(small_run("layout.shard=2", world=2), 2, H200, slow)
    assert split.parts["host"] == pytest.approx(4 * 12 * 1.0, rel=1e-2)


def test_offload_copies_shards_and_steps_on_the_cpu() -> None:
    rates = replace(
        PERFECT, optimizer_traffic=40, host_optimizer=1e10, host_link=1e9 / H200.host_link
    )
    overrides = ["layout.shard=2", "layout.offload=true"]
    found = predict(small_run(*overrides, world=2), 2, H200, rates)
    parameters = (12 * (4 * 768**2 + 3 * 768 * 2048 + 2 * 768) + 768 + 1024 * 768) / 2
    assert found.parts["optimizer"] == pytest.approx(40 * parameters / 1e10)
    # Of four micro-batches each gathers twice and returns gradients once.
    assert found.parts["offload"] == pytest.approx(4 * parameters * 4 * 3 / 1e9)


def test_offloaded_activations_are_copied_while_the_blocks_compute() -> None:
    """Only what the link cannot copy in the time of a pass is waited for, each way by itself."""
    full = ["train.activation_checkpointing=full", "train.micro_batch=16"]
    plain = predict(small_run(*full), 1, H200, PERFECT)
    copied = 12 * 16 * 4096 * 768 * 4  # the float32 residual stream before each block
    forward = plain.parts["matrix products"] / 3 + plain.parts["attention"] / 3.5
    backward = plain.step_s - plain.parts["loss"] - forward
    for link, waits in (
        (copied / forward * 1.01, 0.0),
        (copied / backward * 1.01, copied / (copied / backward * 1.01) - forward),
        (copied / (2 * backward), 4 * backward - forward - backward),
    ):
        rates = replace(PERFECT, host_link=link / H200.host_link)
        found = predict(small_run(*full, "train.offload_activations=true"), 1, H200, rates)
        assert found.step_s - plain.step_s == pytest.approx(waits, rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("micro_batch", [9, 16])
def test_with_a_limit_all_blocks_compute_while_the_first_are_copied(micro_batch: int) -> None:
    """Buffers in pinned memory are of powers of two."""
    batch = [f"train.micro_batch={micro_batch}", f"train.global_batch={micro_batch}"]
    full = ["train.activation_checkpointing=full", *batch]
    offload = [*full, "train.offload_activations=true"]
    plain = predict(small_run(*full), 1, H200, PERFECT)
    each = micro_batch * 4096 * 768 * 4  # before each of 12 blocks
    buffer = {9: 2**27, 16: 2**28}[micro_batch]
    four = f"train.offload_limit_gib={4.5 * buffer / 2**30}"
    forward = plain.parts["matrix products"] / 3 + plain.parts["attention"] / 3.5
    backward = plain.step_s - plain.parts["loss"] - forward

    def waits(link: float, *limit: str) -> float:
        rates = replace(PERFECT, host_link=link / H200.host_link)
        return predict(small_run(*offload, *limit), 1, H200, rates).step_s - plain.step_s

    slow = each / plain.step_s  # a block's copy takes a step
    assert waits(slow) == pytest.approx(2 * 12 * plain.step_s - forward - backward)
    assert waits(slow, "train.offload_limit_gib=100") == pytest.approx(waits(slow))
    assert waits(slow, four) == pytest.approx(2 * 4 * plain.step_s - forward - backward)
    assert waits(4.01 * each / forward) > 0
    assert waits(4.01 * each / forward, four) == pytest.approx(0, abs=1e-9)


def test_micro_batches_in_a_pipeline_share_the_limit_of_offload() -> None:
    """Those between have no copies to hide, so that a third of the blocks waits a third as long."""
    full = ["train.activation_checkpointing=full", "train.offload_activations=true"]
    pipeline = [*full, "layout.shard=1", "layout.pipeline=4"]
    buffer = 2**25  # for 2 x 4096 x 768 elements of 4 bytes, 24 MiB
    plain = predict(small_run(*pipeline[:1], *pipeline[2:], world=4), 4, H200, PERFECT)
    copied = 12 * 16 * 4096 * 768 * 4
    rates = replace(PERFECT, host_link=copied / (4 * plain.step_s) / H200.host_link)
    whole, limited = (
        predict(small_run(*pipeline, *limit, world=4), 4, H200, rates).parts["offload"]
        for limit in ([], [f"train.offload_limit_gib={4 * buffer / 2**30}"])
    )
    assert limited == pytest.approx(whole / 3)  # one of three blocks of each stage
    assert 0 < whole < copied / (rates.host_link * H200.host_link)


def test_compiled_blocks_wait_for_what_they_have_saved_unless_room_is_left() -> None:
    """Each asks at once for all of it, so that of a few storages ahead nothing is hidden."""
    plain, eager = (predict(small_run(*x), 1, H200, PERFECT) for x in ([], ["train.compile=false"]))
    forward = plain.parts["matrix products"] / 3 + plain.parts["attention"] / 3.5
    saved = 12 * 16 * 4096 * 2 * (10 * 768 + 4 * 2048)  # bytes in bf16
    rates = replace(PERFECT, host_link=1.01 * saved / forward / H200.host_link)

    def step(*more: str) -> float:
        run = small_run("train.offload_activations=true", *more)
        return predict(run, 1, H200, rates).step_s

    assert step() - plain.step_s == pytest.approx(forward / 1.01)
    assert step("train.compile=false") == pytest.approx(eager.step_s)
    assert step("train.offload_limit_gib=2.5") == pytest.approx(plain.step_s)  # 10 of 12 blocks


def test_16_gib_of_offload_are_predicted_slower_than_three_recomputed_layers() -> None:
    """Tokens/s of docs/measurements.md, "Training steps"."""
    size = ["model.preset=350m", "model.vocab=50304", "data.context=262144"]
    batch = ["train.micro_batch=1", "train.global_batch=1", "train.residual_precision=bf16"]
    lengths = [2048 << i for i in range(8)]
    dilated = [f"attention.segment_lengths={lengths}"]
    dilated += [f"attention.dilation_rates={[1 << i for i in range(8)]}"]
    recomputed = ["train.activation_checkpointing=full", "train.recompute_layers=3"]
    offloaded = ["train.activation_checkpointing=selective", "train.offload_activations=true"]
    offloaded += ["train.offload_limit_gib=16"]
    recomputing, offloading = (
        predict(
            load_run(None, [*size, *batch, *dilated, *options], builtin="cuda", world=1), 1, H200
        ).tokens_per_s
        for options in (recomputed, offloaded)
    )
    assert recomputing / offloading == pytest.approx(173_422 / 166_197, rel=0.01)


@pytest.mark.parametrize(
    ("measured", "options"),
    [
        (55_065, ["train.optimizer=adamw8bit"]),
        (56_138, ["train.optimizer=adamw8bit", "train.parameter_precision=bf16"]),
        (12_272, ["layout.offload=true"]),  # the mean of two hosts
    ],
)
def test_what_saves_the_memory_of_states_costs_the_measured_time(
    measured: float, options: list[str]
) -> None:
    """Tokens/s of docs/measurements.md, "What 8-bit AdamW, bf16 parameters and offload cost"."""
    size = ["model.preset=1.3b", "model.vocab=50304", "data.context=8192"]
    batch = ["train.micro_batch=2", "train.global_batch=2", "train.residual_precision=bf16"]
    dilated = ["attention.segment_lengths=[2048,4096,8192]", "attention.dilation_rates=[1,2,4]"]
    run = load_run(None, [*size, *batch, *dilated, *options], builtin="cuda", world=1)
    assert predict(run, 1, H200).tokens_per_s == pytest.approx(measured, rel=0.07)


RANKS = {"replicate": 2, "shard": 4, "sequence": 2, "tensor": 4, "pipeline": 1}


def test_a_group_within_a_node_uses_links_and_one_over_nodes_all_its_network_cards() -> None:
    """Of 64 GPUs in nodes of 8: tensor ranks are neighbours, shards every fourth GPU."""
    rates = RunRates(link=0.5, network=0.5, link_latency_s=1e-5, network_latency_s=1e-4)
    within = Traffic("tensor", "all_reduce", 4, 10**9, 1, "")
    assert collective_s(within, RANKS, H200, rates) == pytest.approx(1e-5 + 1.5 * 1e9 / 225e9)
    over = Traffic("shard", "all_gather", 8, 10**9, 1, "")  # two of each of four nodes
    network = 2 * 25e9
    assert collective_s(over, RANKS, H200, rates) == pytest.approx(2e-4 + 7 / 8 * 1e9 / network)


def test_what_overlaps_hides_behind_compute_but_its_packing_does_not() -> None:
    rates = RunRates(link=1, link_latency_s=FREE, overlap=0.5, bandwidth=1)
    sent = [Traffic("tensor", "broadcast", 4, 450 * 10**9, 1, "", overlaps=True)]  # 1 s
    assert exposed_s(sent, RANKS, H200, rates, 3.0) == {}
    assert exposed_s(sent, RANKS, H200, rates, 1.0) == pytest.approx({"tensor": 0.5})
    ranks = {**RANKS, "tensor": 1, "replicate": 1, "sequence": 1}
    gathered = [Traffic("shard", "broadcast", 4, 450 * 10**9, 1, "", overlaps=True)]
    packing = 2 * 450e9 / 4.8e12
    assert exposed_s(gathered, ranks, H200, rates, 2.0) == pytest.approx({"shard": packing})


def test_runs_that_nothing_was_fitted_to_are_predicted_within_the_stated_band() -> None:
    rows = efficiencies()["unfitted"]
    runs = [load_run(None, row["overrides"], builtin="cuda", world=1) for row in rows]
    predicted = np.array([predict(run, 1, H200).tokens_per_s for run in runs])
    errors = quantiles(np.abs(predicted / [row["tokens_per_s"] for row in rows] - 1))
    band = band_of(H200, 1)
    assert band is not None
    assert band.runs == len(rows)
    assert (band.median, band.p90) == pytest.approx((errors["median"], errors["p90"]), abs=1e-3)
    assert band_of(devices()["h100"], 1) is None
    assert band_of(H200, 2) is None


def test_a_precision_that_the_gpu_lacks_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"'bf16' is not supported by V100.*'fp16'"):
        predict(small_run(), 1, devices()["v100"])


def test_cpu_processes_share_the_machine() -> None:
    run = load_run(None, ["train.global_batch=4"], world=4)
    four, one = predict(run, 4, cpu_device(4)), predict(run, 1, cpu_device(1))
    assert four.step_tokens == one.step_tokens
    assert cpu_device(4).flops["fp32"] * 4 == cpu_device(1).flops["fp32"]


@pytest.mark.parametrize(("head_dim", "measured"), [(64, 323e12), (128, 374e12)])
def test_the_rate_of_windows_is_about_the_measured_one(head_dim: int, measured: float) -> None:
    """See docs/measurements.md: a window of 4,096 with 64 sinks on an H200."""
    found = attention_rate(Window(4096, sinks=64), head_dim, rates_of(H200), H200) * 989e12
    assert found == pytest.approx(measured, rel=0.1)


def test_dense_attention_has_the_rate_of_the_kernels_that_serve_it() -> None:
    rates = RunRates(dense=0.6, dilated=0.7, half_head_dim=FREE)
    a100 = devices()["a100"]
    found = [attention_rate(Dense(), dim, rates, gpu) for gpu in (H200, a100) for dim in (64, 128)]
    assert found == pytest.approx([0.7, 0.6, 0.6, 0.6])


def test_products_in_fp8_take_the_time_of_its_peak_and_of_the_casts() -> None:
    """The head's products are not among them."""
    rates = replace(PERFECT, fp8_matmul=1, fp8_traffic=7, bandwidth=1)
    plain, fp8 = (predict(small_run(*more), 1, H200, rates) for more in ([], ["train.fp8=true"]))
    assert fp8.parts["matrix products"] == pytest.approx(
        plain.parts["matrix products"] * 989 / 1979
    )
    assert fp8.parts["loss"] == plain.parts["loss"]
    features = 12 * (4 * 2 * 768 + 3 * (768 + 2048))
    casts = 7 * 16 * 4096 * features / H200.bandwidth
    assert fp8.parts["casts to fp8"] == pytest.approx(casts)
    with pytest.raises(UserError, match=r"train.fp8 = true is not supported by A100"):
        predict(small_run("train.fp8=true"), 1, devices()["a100"], rates)


@pytest.mark.parametrize(("gpu", "faster"), [("h200", 494 / 67), ("v100", 1.0)])
def test_products_in_tf32_take_the_time_of_its_peak(gpu: str, faster: float) -> None:
    """Attention computes in float32, and a V100 has no TF32."""
    plain, tf32 = (
        predict(small_run("train.precision=fp32", *more), 1, devices()[gpu], PERFECT)
        for more in ([], [TF32])
    )
    for part in ("matrix products", "loss"):
        assert plain.parts[part] / tf32.parts[part] == pytest.approx(faster)
    assert tf32.parts["attention"] == plain.parts["attention"]
    bf16 = [predict(small_run(*more), 1, H200, PERFECT).step_s for more in ([], [TF32])]
    assert bf16[0] == bf16[1]

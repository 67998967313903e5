"""FLOPs against PyTorch's counter over transformers' model of every family, and against a count by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from slime.models.flops import FlopsModel, flops_model, forward_flops
from slime.models.shape import ModelShape, model_shape, moe_layer_pattern
from tests.support.arguments import run_args
from tests.support.megatron_model import model_args
from tests.support.model_families import FAMILIES, SIZES, Tiny

LENGTH = 12
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
PLAIN = {
    "qwen2": Tiny("qwen2", {}),
    "qwen3": Tiny("qwen3", {"tie_word_embeddings": True}),
    "llama": Tiny("llama", {"num_key_value_heads": 4}),
    "qwen2_moe": Tiny(
        "qwen2_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
    ),
    "qwen3_moe": Tiny("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
}
ALL = {**PLAIN, **{name: tiny for name, tiny in FAMILIES.items() if not tiny.whole}}


def make_config(tiny: Tiny, **fields: Any) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[tiny.model_type](**{**SIZES, **tiny.fields, **fields})


def make_args(folder: Path, config: Any, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, *flags: Any) -> Any:
    """The parsed arguments of a run on a checkpoint with this config (and no weights)."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    config.save_pretrained(folder)
    written = {**json.loads((folder / "config.json").read_text()), **tiny.config}
    (folder / "config.json").write_text(json.dumps(written))
    return model_args(folder, *flags)


def counted_flops(config: Any) -> int:
    """FLOPs of transformers' forward, without rotary tables, indexers and the recurrence of gated delta nets.

    Linear attention is left with its projections: its fallback without kernels is another algorithm.
    """
    from transformers import AutoModelForCausalLM

    config._attn_implementation, config._experts_implementation = "eager", "eager"
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tokens = torch.arange(LENGTH)[None]
    counter = FlopCounterMode(display=False, depth=None)
    with torch.no_grad(), counter:
        model(tokens)
    by_module = {name.partition(".")[2]: sum(counts.values()) for name, counts in counter.get_flop_counts().items()}
    total = counter.get_total_flops()
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind.endswith(("RotaryEmbedding", "Indexer")):
            total -= by_module.get(name, 0)
        if kind.endswith("GatedDeltaNet"):
            projections = [f"{name}.{child}" for child, m in module.named_children() if isinstance(m, torch.nn.Linear)]
            total -= by_module[name] - sum(by_module[child] for child in projections)
    return total


def recurrence(shape: ModelShape) -> int:
    """Convolution and delta rule of all gated delta nets, per token (Megatron-LM's count)."""
    net = shape.linear
    if net is None:
        return 0
    convolution = 2 * net.kernel * (2 * net.keys + net.values)
    delta_rule = 2 * 4 * net.value_heads * net.key_dim * net.value_dim
    return sum(kind.linear for kind in shape.kinds) * (convolution + delta_rule)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "mixtral" else ()) for name in ALL]
)  # mbridge, which is asked about Mixtral, takes seconds to import
def test_every_family_against_the_counter(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter takes scores of masked positions for work too, hence the quadratic term twice, and no window."""
    tiny = ALL[name]
    config = make_config(tiny, **({"first_k_dense_replace": 2} if name == "deepseek_v3-dense" else {}))
    args = make_args(tmp_path, config, tiny, monkeypatch)
    flops, shape = flops_model(args), model_shape(args)
    if name.startswith(("qwen3_next", "qwen3_5")):
        assert [kind.linear for kind in shape.kinds] == [True, False]
        assert shape.output_gate
        assert recurrence(shape) > 0
    if name.startswith(("gemma", "gpt_oss")):
        assert [window for window, _ in flops.windows] == [8]
    quadratic = flops.quadratic + sum(flops for _, flops in flops.windows)
    assert (flops.linear - recurrence(shape)) * LENGTH + 2 * quadratic * LENGTH**2 == counted_flops(config)


@pytest.mark.parametrize("name", ["mimo", "glm4_moe"])
def test_an_mtp_layer_is_a_projection_a_layer_and_an_output_layer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = FAMILIES[name]._replace(config={**FAMILIES[name].config, "num_nextn_predict_layers": 1})
    args = make_args(tmp_path, make_config(tiny), tiny, monkeypatch, "--mtp-num-layers", 1)
    without, with_mtp = flops_model(args), flops_model(args, mtp=True)
    dense = {"first_k_dense_replace": 0} if name == "glm4_moe" else {}
    one_layer = counted_flops(make_config(tiny, num_hidden_layers=1, **dense))
    projection = 2 * LENGTH * 128 * 64
    linear, quadratic = with_mtp.linear - without.linear, with_mtp.quadratic - without.quadratic
    assert linear * LENGTH + 2 * quadratic * LENGTH**2 == one_layer + projection


def matmul(rows: int, inner: int, columns: int) -> int:
    return 2 * rows * inner * columns


def tiny_args(**changes: Any) -> Any:
    return run_args(num_layers=3, hidden_size=16, num_query_groups=2, kv_channels=8, ffn_hidden_size=40, **changes)


def test_dense_model_by_hand() -> None:
    length = 7
    layer = (
        matmul(length, 16, 4 * 8)  # query
        + 2 * matmul(length, 16, 2 * 8)  # key, value
        + 4 * (matmul(length, 8, length) + matmul(length, length, 8)) / 2  # scores and values, half of them masked
        + matmul(length, 4 * 8, 16)  # output
        + 2 * matmul(length, 16, 40)  # gate, up
        + matmul(length, 40, 16)  # down
    )
    assert flops_model(tiny_args()).forward([length])[0] == 3 * layer + matmul(length, 16, 384)
    ungated = forward_flops(tiny_args(swiglu=False, gated_linear_unit=False), [length])
    assert ungated == 3 * (layer - matmul(length, 16, 40)) + matmul(length, 16, 384)
    padded = forward_flops(tiny_args(padded_vocab_size=512), [length])
    assert padded == 3 * layer + matmul(length, 16, 512)


def test_windows_by_hand() -> None:
    """A query sees the last three tokens: of seven queries the first sees one, the second two, the others three."""
    model = FlopsModel(linear=0.0, quadratic=0.0, windows=((3, 5.0),))
    pairs = [1 + 2 + 3 * 5, 1 + 2 + 3, 1 + 2, 1]
    # c L^2 stands for L^2 / 2 pairs: the diagonal counts half
    halves = [pair - min(length, 3) / 2 for pair, length in zip(pairs, (7, 3, 2, 1), strict=True)]
    assert model.forward([7, 3, 2, 1]).tolist() == [10.0 * half for half in halves]


def test_sums_over_sequences_not_over_their_concatenation() -> None:
    args = tiny_args()
    assert forward_flops(args, [3, 4]) == forward_flops(args, [3]) + forward_flops(args, [4])
    assert forward_flops(args, [7]) > forward_flops(args, [3, 4])  # attention is quadratic


def test_experts_only_in_the_layers_that_have_them() -> None:
    moe = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 10, "moe_shared_expert_intermediate_size": 12}
    length = 5
    one = forward_flops(tiny_args(moe_layer_freq=[0, 1, 0], **moe), [length])
    all_dense = forward_flops(tiny_args(), [length])
    experts = 3 * matmul(length, 16, 2 * 10 + 12) + matmul(length, 16, 8)
    assert all_dense - one == 3 * matmul(length, 16, 40) - experts


def test_qwen3_next_80b_is_not_counted_as_softmax_attention() -> None:
    """36 of its 48 layers have linear attention, whose work does not grow with the square of the length."""
    kinds = [1, 1, 1, 0] * 12
    hybrid = flops_model(run_args(num_layers=48, num_attention_heads=16, kv_channels=256, linear_attention_freq=kinds))
    softmax = flops_model(run_args(num_layers=48, num_attention_heads=16, kv_channels=256))
    assert hybrid.quadratic == softmax.quadratic / 4 == 12 * 16 * 512


def test_layer_pattern() -> None:
    assert moe_layer_pattern(2, 5) == [1, 0, 1, 0, 1]
    assert moe_layer_pattern([0, 1, 1], 3) == [0, 1, 1]
    with pytest.raises(ValueError, match="2 entries for 3 layers"):
        moe_layer_pattern([0, 1], 3)

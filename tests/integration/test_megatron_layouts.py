"""Real megatron-core on two ranks: logits, weights and attention in every layout. One launch serves all tests here."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.dense_attention import dense_attention, undo_zigzag_pack
from tests.support.distributed import run_distributed
from tests.support.megatron_checks import ATTENTION_LENGTHS, LAYOUTS, MODELS_OF, attention_inputs
from tests.support.megatron_model import assemble, sequences
from tests.support.megatron_references import MODELS, Reference, make_checkpoints, reference

pytestmark = pytest.mark.integration

CASES = [(name, layout) for layout in LAYOUTS for name in MODELS_OF.get(layout, MODELS)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(scope="module")
def ranks(checkpoints: dict[str, str], scratch: Path) -> list[dict[str, Any]]:
    arguments = {"checkpoints": checkpoints, "scratch": str(scratch), "layouts": LAYOUTS}
    return run_distributed("tests.support.megatron_checks:all_layouts", 2, arguments, timeout=300)


@pytest.fixture(scope="module")
def references(checkpoints: dict[str, str]) -> dict[str, Reference]:
    """Every checkpoint by transformers and autograd, one sequence after the other."""
    return {name: reference(path) for name, path in checkpoints.items()}


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_logits_equal_transformers(name: str, layout: str, ranks: Any, references: Any) -> None:
    expected = references[name].logits
    seen = assemble([rank[f"{layout}/{name}"]["forward"] for rank in ranks], expected.shape[1])
    assert expected.std() > 0.3
    torch.testing.assert_close(seen, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_weights_round_trip_bit_for_bit(name: str, layout: str, ranks: Any, references: Any) -> None:
    expected = references[name].weights
    for rank in ranks:
        seen = rank[f"{layout}/{name}"]["weights"]
        assert sorted(n for n, _ in seen) == sorted(expected)
        assert all(torch.equal(tensor, expected[n]) for n, tensor in seen)
        assert rank[f"{layout}/{name}"]["described"]
    assert [n for n, _ in ranks[0][f"{layout}/{name}"]["weights"]] == [
        n for n, _ in ranks[1][f"{layout}/{name}"]["weights"]
    ]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_gradients_equal_autograd(name: str, layout: str, ranks: Any, references: Any) -> None:
    expected = references[name].gradients
    for rank in ranks:
        seen = dict(rank[f"{layout}/{name}"]["gradients"])
        assert seen.keys() == expected.keys()
        for parameter, gradient in seen.items():
            error = (gradient - expected[parameter]).norm() / expected[parameter].norm()
            assert error < 1e-5, (parameter, error)


def test_rope_scaling_matters(checkpoints: dict[str, str], references: Any) -> None:
    """The llama3 case would prove nothing if scaling did not change these short sequences' logits."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(checkpoints["llama3-rope"], dtype=torch.float32)
    plain.config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    unscaled = type(plain)(plain.config)
    unscaled.load_state_dict(plain.state_dict())
    with torch.no_grad():
        logits = torch.cat([unscaled(s[None]).logits[0] for s in sequences(plain.config.vocab_size)])
    assert (logits - references["llama3-rope"].logits).abs().max() > 1e-3


@pytest.mark.parametrize(("name", "layout"), [case for case in CASES if case[1] in ("tp2", "pp2", "ep2")])
def test_export_is_a_checkpoint(
    name: str, layout: str, ranks: Any, references: Any, scratch: Path, checkpoints: dict[str, str]
) -> None:
    from safetensors.torch import load_file

    directory = scratch / f"{name}-{layout}"
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    files = sorted({path.name for path in directory.glob("*.safetensors")})
    count = len(files)
    assert count > 2
    assert files == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    tensors = {}
    for file in files:
        content = load_file(directory / file)
        assert {n for n, f in index["weight_map"].items() if f == file} == set(content)
        tensors.update(content)
    expected = references[name].weights
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[n], expected[n]) for n in expected)
    assert index["metadata"]["total_size"] == sum(4 * t.numel() for t in expected.values())
    source = Path(checkpoints[name])
    for copied in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (directory / copied).read_bytes() == (source / copied).read_bytes()
    assert [p for p in os.listdir(scratch) if p.startswith(".")] == []


def test_unequal_parts_are_gathered_and_reduced(ranks: list[dict[str, Any]]) -> None:
    rows, results = torch.arange(8.0).view(4, 2), [rank["unequal parts"] for rank in ranks]
    for result, own in zip(results, rows.split([3, 1]), strict=True):
        assert torch.equal(result["gathered"], rows)
        assert torch.equal(result["part"], own * 3)  # rank 0's gradient once, rank 1's twice
        assert torch.equal(result["reduced"], own * 2 + 100)
        assert torch.equal(result["whole"], rows)


def test_context_parallel_attention_equals_dense(ranks: list[dict[str, Any]]) -> None:
    q, k, v, grad = (x.double() for x in attention_inputs())
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = dense_attention(q, k, v, ATTENTION_LENGTHS)
    out.backward(grad)
    for name, expected in {"out": out.detach(), "q": q.grad, "k": k.grad, "v": v.grad}.items():
        seen = undo_zigzag_pack([rank["attention"][name] for rank in ranks], ATTENTION_LENGTHS)
        torch.testing.assert_close(seen.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("missing", ["ValueError", "model.layers.1.self_attn.q_proj.weight", "1 tensors", "missing"]),
        ("layer", ["model.layers.4.mlp.up_proj.weight", "model.safetensors", "no place"]),
        ("bias", ["model.layers.0.self_attn.q_proj.bias", "model.safetensors", "no place"]),
        ("fp8", ["model.layers.1.self_attn.q_proj.weight_scale_inv", "no place", "in FP8", "fp8_cast_bf16"]),
        ("shape", ["model.layers.1.self_attn.q_proj.weight", "model.safetensors", "[63, 64]", "[64, 64]"]),
        ("family", ["mistral", "llama", "qwen2", "qwen3"]),
        ("tied", ["ValueError", "q_layernorm", "llama"]),
        ("into-source", ["ValueError", "--hf-checkpoint"]),
        ("above-source", ["ValueError", "--hf-checkpoint"]),
        ("below-a-file", ["RuntimeError", "rank 0", "export failed while preparing"]),
        ("twice", ["RuntimeError", "twice"]),
        ("unmatched", ["--freeze-params-name-list", "no_such_parameter"]),
        ("mtp", ["qwen3", "no rule", "mtp.layers.0.enorm.weight"]),
    ],
)
def test_refusals_name_what_is_wrong(case: str, words: list[str], ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        message = rank["errors"][case]
        assert all(word in message for word in words), message


def test_leftover_rotary_buffers_are_ignored(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["errors"]["good"] == "nothing was raised"


def test_name_lists_choose_what_is_trained(ranks: list[dict[str, Any]]) -> None:
    frozen = ranks[0]["frozen"]
    assert frozen["only"] == [
        "decoder.layers.0.mlp.linear_fc1.weight",
        "decoder.layers.0.mlp.linear_fc2.weight",
        *(f"decoder.layers.{i}.mlp.linear_fc1.weight" for i in (1, 2, 3)),
    ]
    assert frozen["freeze"] == []
    assert "embedding.word_embeddings.weight" in frozen["all"]


def test_tensor_parallel_ranks_share_one_generator_and_differ_in_the_other(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["seeds"] for rank in ranks)
    assert first["default"] == second["default"]
    assert first["forked"] != second["forked"]
    assert first["resumed"]
    assert second["resumed"]

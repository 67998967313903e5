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
from tests.support.megatron_checks import ATTENTION_LENGTHS, LAYOUTS, attention_inputs
from tests.support.megatron_model import assemble, sequences
from tools.tiny_model import make_tiny_checkpoint

pytestmark = pytest.mark.integration

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
# The vocabulary of "qwen3-padded" is no multiple of 128: its last rows are padding, under TP2 all on the last rank.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-padded": ("qwen3", {"tie_word_embeddings": False, "vocab_size": 300, "head_dim": 24}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-untied": ("qwen2", {"tie_word_embeddings": False, "num_hidden_layers": 3}),
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama3-rope": (
        "llama",
        {"tie_word_embeddings": True, "rope_parameters": LLAMA3, "max_position_embeddings": 16384},
    ),
}


def _randomize(checkpoint: Path) -> None:
    """Give every tensor values of its own: fresh checkpoints have all norms one and all biases zero."""
    from safetensors.torch import load_file, save_file

    path = checkpoint / "model.safetensors"
    generator = torch.Generator().manual_seed(11)
    tensors = {}
    for name, tensor in load_file(path).items():
        noise = torch.randn(tensor.shape, generator=generator)
        tensors[name] = 1 + 0.3 * noise if "norm" in name else 0.3 * noise if name.endswith("bias") else 0.15 * noise
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("checkpoints")
    made = {}
    for name, (family, options) in MODELS.items():
        made[name] = str(make_tiny_checkpoint(folder / name, family, **options))
        _randomize(Path(made[name]))
    return made


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(scope="module")
def ranks(checkpoints: dict[str, str], scratch: Path) -> list[dict[str, Any]]:
    arguments = {"checkpoints": checkpoints, "scratch": str(scratch)}
    return run_distributed("tests.support.megatron_checks:everything", 2, arguments, timeout=300)


@pytest.fixture(scope="module")
def references(checkpoints: dict[str, str]) -> dict[str, tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Logits and weights of every checkpoint by transformers."""
    from transformers import AutoModelForCausalLM

    made = {}
    for name, path in checkpoints.items():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        with torch.no_grad():
            logits = torch.cat([model(s[None]).logits[0] for s in sequences(model.config.vocab_size)])
        weights = {n: p for n, p in model.state_dict().items() if not (n == "lm_head.weight" and _is_tied(path))}
        made[name] = (logits, weights)
    return made


def _is_tied(checkpoint: str) -> bool:
    return json.loads((Path(checkpoint) / "config.json").read_text())["tie_word_embeddings"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, layout: str, ranks: Any, references: Any) -> None:
    expected, _ = references[name]
    seen = assemble([rank[f"{layout}/{name}"]["forward"] for rank in ranks], expected.shape[1])
    assert expected.std() > 0.3
    torch.testing.assert_close(seen, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_weights_come_back_bit_for_bit(name: str, layout: str, ranks: Any, references: Any) -> None:
    _, expected = references[name]
    for rank in ranks:
        seen = rank[f"{layout}/{name}"]["weights"]
        assert sorted(n for n, _ in seen) == sorted(expected)
        assert all(torch.equal(tensor, expected[n]) for n, tensor in seen)
        assert rank[f"{layout}/{name}"]["described"]
    assert [n for n, _ in ranks[0][f"{layout}/{name}"]["weights"]] == [
        n for n, _ in ranks[1][f"{layout}/{name}"]["weights"]
    ]


def test_rope_scaling_matters(checkpoints: dict[str, str], references: Any) -> None:
    """The llama3 case would prove nothing if scaling did not change these short sequences' logits."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(checkpoints["llama3-rope"], dtype=torch.float32)
    plain.config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    unscaled = type(plain)(plain.config)
    unscaled.load_state_dict(plain.state_dict())
    with torch.no_grad():
        logits = torch.cat([unscaled(s[None]).logits[0] for s in sequences(plain.config.vocab_size)])
    assert (logits - references["llama3-rope"][0]).abs().max() > 1e-3


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
@pytest.mark.parametrize("name", MODELS)
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
    _, expected = references[name]
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[n], expected[n]) for n in expected)
    assert index["metadata"]["total_size"] == sum(4 * t.numel() for t in expected.values())
    source = Path(checkpoints[name])
    for copied in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (directory / copied).read_bytes() == (source / copied).read_bytes()
    assert [p for p in os.listdir(scratch) if p.startswith(".")] == []


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
        ("layer", ["model.layers.2.mlp.up_proj.weight", "model.safetensors", "no place"]),
        ("bias", ["model.layers.0.self_attn.q_proj.bias", "model.safetensors", "no place"]),
        ("shape", ["model.layers.1.self_attn.q_proj.weight", "model.safetensors", "[63, 64]", "[64, 64]"]),
        ("family", ["gpt_oss", "llama", "qwen2", "qwen3"]),
        ("tied", ["ValueError", "q_layernorm", "llama"]),
        ("into-source", ["ValueError", "--hf-checkpoint"]),
        ("above-source", ["ValueError", "--hf-checkpoint"]),
        ("twice", ["RuntimeError", "twice"]),
        ("unmatched", ["--freeze-params-name-list", "no_such_parameter"]),
        ("virtual", ["--virtual-pipeline-model-parallel-size"]),
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
        "decoder.layers.1.mlp.linear_fc1.weight",
    ]
    assert frozen["freeze"] == []
    assert "embedding.word_embeddings.weight" in frozen["all"]


def test_tensor_parallel_ranks_share_one_generator_and_differ_in_the_other(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["seeds"] for rank in ranks)
    assert first["default"] == second["default"]
    assert first["forked"] != second["forked"]
    assert first["resumed"]
    assert second["resumed"]

"""Engines of a quantized checkpoint are sent its format: they hold what they load from the converted checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.sglang_utils.engine import EngineProcess
from slime.servers.engine_client import EngineClient
from slime.weights.hf.checkpoint import HfCheckpoint
from slime.weights.quantization import Format, Fp8, Int4
from slime.weights.quantization.files import quantize_checkpoint
from tests.support.distributed import run_distributed
from tests.support.engines import Reference, engine_args, output_log_probs
from tools.tiny_model import make_tiny_checkpoint

pytestmark = pytest.mark.integration

BLOCKS = Fp8((128, 128), "block")
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4}  # parts of fused layers: whole blocks
PROMPT = list(range(40, 80))


@dataclass
class Stored:
    """An engine that started on the first of ``quantized``, of two checkpoints ``plain``."""

    engine: EngineProcess
    plain: list[Path]
    quantized: list[Path]

    @property
    def client(self) -> EngineClient:
        return self.engine.client(timeout=120)


@contextmanager
def serving(folder: Path, form: Format, family: str = "qwen3", **sizes: Any) -> Iterator[Stored]:
    plain = [make_tiny_checkpoint(folder / f"model{seed}", family, seed=seed, **sizes) for seed in (0, 1)]
    quantized = [folder / f"model{seed}-quantized" for seed in (0, 1)]
    for source, target in zip(plain, quantized, strict=True):
        quantize_checkpoint(source, target, form)
    args = engine_args(quantized[0], sglang_dtype="bfloat16")
    engine = EngineProcess(args, rank=0, host="127.0.0.1", log_path=folder / "engine.log")
    try:
        engine.start()
        engine.wait_ready()
        yield Stored(engine, plain, quantized)
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    with serving(tmp_path_factory.mktemp("quantized"), BLOCKS, **SIZES) as stored:
        yield stored


def log_probs(client: EngineClient) -> tuple[list[int], torch.Tensor]:
    """Return greedy tokens and their log-probs."""
    client.flush_cache()
    params = {"max_new_tokens": 16, "temperature": 0.0, "ignore_eos": True}
    reply = client.generate({"input_ids": PROMPT, "sampling_params": params, "return_logprob": True}, timeout=300)
    return list(reply["output_ids"]), output_log_probs(dict(reply))


def same(one: Path, other: Path) -> bool:
    with HfCheckpoint(one) as ours, HfCheckpoint(other) as theirs:
        return ours.names == theirs.names and all(
            torch.equal(*(c.tensor(name).flatten().view(torch.uint8) for c in (ours, theirs))) for name in ours.names
        )


@pytest.mark.parametrize(
    ("colocate", "flags"),
    [(False, ("--pipeline-model-parallel-size", "2")), (True, ("--tensor-model-parallel-size", "2"))],
)
def test_a_push_is_a_load_of_the_converted_checkpoint(
    stored: Stored, tmp_path: Path, colocate: bool, flags: tuple[str, ...]
) -> None:
    compare(stored, tmp_path, colocate=colocate, flags=flags)


def compare(stored: Stored, folder: Path, *, colocate: bool, flags: tuple[str, ...], wrong: float = 0.05) -> None:
    """Compare a push with a load of the converted checkpoint; ``wrong``: what log-probs differ by from unquantized."""
    client = stored.client
    client.update_weights_from_disk(str(stored.quantized[1]), weight_version="converted")
    expected, loaded = client.weights_checksum(), log_probs(client)
    scored = Reference(stored.plain[1]).log_probs(PROMPT, loaded[0])
    assert (scored - loaded[1]).abs().max() < wrong
    client.update_weights_from_disk(str(stored.quantized[0]), weight_version="old")
    assert client.weights_checksum() != expected

    export = folder / "export"
    arguments: dict[str, Any] = {
        "checkpoint": str(stored.plain[1]), "stored_as": str(stored.quantized[0]), "export_to": str(export),
        "engines": [{**asdict(stored.engine.info), "gpu_offset": 0}], "colocate": colocate,
        "flags": ["--update-weight-buffer-size", "20000", *flags],  # parts weights from their scales
    }  # fmt: skip
    results = run_distributed("tests.support.weight_sync_ranks:push", 2, arguments, timeout=300)
    assert client.weights_checksum() == expected
    tokens, pushed = log_probs(client)
    assert tokens == loaded[0]
    assert torch.equal(pushed, loaded[1])
    with HfCheckpoint(stored.quantized[1]) as checkpoint:
        size = sum(checkpoint.tensor(name).nbytes for name in checkpoint.names)
    assert results[0]["bytes"][0] == size if colocate else sum(r["bytes"][0] for r in results) == size

    assert same(Path(f"{export}-quantized"), stored.quantized[1])
    config = json.loads(Path(f"{export}-quantized", "config.json").read_text())
    assert config == json.loads((stored.quantized[1] / "config.json").read_text())
    assert same(export, stored.plain[1])
    assert "quantization_config" not in json.loads((export / "config.json").read_text())


MOE: dict[str, Any] = {"moe_intermediate_size": 128, "tie_word_embeddings": False}


def test_layers_that_engines_rearrange_are_sent_int4(tmp_path: Path) -> None:
    """Attention and experts; the second push is into what the first one rearranged."""
    with serving(tmp_path, Int4(32), "qwen3_moe", **MOE) as stored:
        compare(stored, tmp_path, colocate=True, flags=("--expert-model-parallel-size", "2"), wrong=0.2)

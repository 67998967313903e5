"""Adapters that are pushed to a stock engine compute what the merged weights do, while it continues to generate."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.backends.sglang_utils.engine import EngineProcess
from slime.servers.engine_client import EngineClient
from slime.servers.http import EngineError
from slime.weight_sync.buckets import Bucket
from slime.weight_sync.tensor import serialize
from tests.support.distributed import run_distributed
from tests.support.engines import Reference, engine_args, output_log_probs
from tests.support.lora_ranks import ALPHA, RANK, write_random_adapter
from tests.support.trainer import tiny_checkpoint

pytestmark = pytest.mark.integration

DENSE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROMPT = list(range(40, 80))


class Served:
    """An engine of a tiny model, and adapters for it."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = tiny_checkpoint(folder / "model", seed=0)
        self.adapters = [
            write_random_adapter(self.checkpoint, folder / f"adapter{seed}", DENSE, seed) for seed in range(3)
        ]
        self.merged = [self._merge(directory, folder) for directory in self.adapters]
        args = engine_args(
            self.checkpoint,
            lora_rank=RANK,
            lora_alpha=ALPHA,
            lora_sync="adapter",
            sglang_lora_paths=[f"judge={self.adapters[2]}"],
        )
        self.engine = EngineProcess(args, rank=0, host="127.0.0.1", log_path=folder / "engine.log")

    @property
    def client(self) -> EngineClient:
        return self.engine.client(timeout=120)

    def tensors(self, number: int) -> dict[str, torch.Tensor]:
        return load_file(Path(self.adapters[number]) / "adapter_model.safetensors")

    def _merge(self, directory: str, folder: Path) -> str:
        out = folder / f"{Path(directory).name}-merged"
        shutil.copytree(self.checkpoint, out)
        weights, adapter = (
            load_file(out / "model.safetensors"),
            load_file(Path(directory) / "adapter_model.safetensors"),
        )
        for key in weights:
            start = f"base_model.model.{key.removesuffix('.weight')}"
            if f"{start}.lora_A.weight" in adapter:
                product = adapter[f"{start}.lora_B.weight"] @ adapter[f"{start}.lora_A.weight"]
                weights[key] = weights[key] + ALPHA / RANK * product
        save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
        return str(out)

    def push(self, number: int, version: int) -> str:
        """Load an adapter as the trainer does, and let the engine use it; return its name."""
        bucket = Bucket(tuple(self.tensors(number).items()), is_last=True)
        config = json.loads((Path(self.adapters[number]) / "adapter_config.json").read_text())
        name = f"policy@{version}-test"
        payloads = [serialize(bucket.flatten(), bucket)]
        self.client.load_lora_adapter_from_tensors(
            lora_name=name, config_dict=config, serialized_named_tensors=payloads
        )
        self.client.update_weight_version(str(version))
        return name

    def generate(self, tokens: int = 12, **fields: Any) -> dict[str, Any]:
        params = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
        payload = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True, **fields}
        return dict(self.client.generate(payload, timeout=300))

    def assert_is_of(self, reply: dict[str, Any], checkpoint: str, version: str) -> None:
        """The tokens' log-probs are those of the model with the adapter merged, and the version is the adapter's."""
        expected = Reference(checkpoint).log_probs(PROMPT, list(reply["output_ids"]))
        assert (output_log_probs(reply) - expected).abs().max() < 1e-4
        assert reply["meta_info"]["weight_version"] == version
        assert "weight_versions" not in reply["meta_info"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    found = Served(tmp_path_factory.mktemp("served"))
    try:
        found.engine.start()
        found.engine.wait_ready()
        yield found
    finally:
        found.engine.stop()


def test_pushed_adapters_are_served(served: Served) -> None:
    base = served.generate()
    assert (
        output_log_probs(base) - Reference(served.checkpoint).log_probs(PROMPT, list(base["output_ids"]))
    ).abs().max() < 1e-4
    arguments = {
        "checkpoint": served.checkpoint, "directories": served.adapters[:2],
        "engine": {**asdict(served.engine.info), "gpu_offset": 0},
    }  # fmt: skip
    pushed = run_distributed("tests.support.lora_ranks:push_adapters", 1, arguments, timeout=300)[0]
    size = sum(tensor.nbytes for tensor in served.tensors(0).values())
    assert pushed == {"versions": [1, 2], "bytes": [size, size]}
    served.assert_is_of(served.generate(), served.merged[1], "2")


def test_requests_continue_with_the_adapter_that_they_began_with(served: Served) -> None:
    first = served.push(0, 11)
    replies: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: replies.append(served.generate(600)))
    thread.start()
    deadline = time.monotonic() + 60
    while served.client.num_requests() == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    served.push(2, 12)
    during = served.generate()
    third = served.push(1, 13)
    assert thread.is_alive()  # neither push has waited for it
    thread.join(120)
    served.assert_is_of(during, served.merged[2], "12")
    served.assert_is_of(replies[0], served.merged[0], "11")
    served.push(0, 14)
    served.assert_is_of(served.generate(), served.merged[0], "14")
    served.assert_is_of(served.generate(lora_path=third), served.merged[1], "13")
    with pytest.raises(EngineError, match="never been loaded"):
        served.generate(lora_path=first)


def test_a_batch_reports_the_version_of_every_request(served: Served) -> None:
    names = [served.push(0, 21), served.push(1, 22)]
    params = {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    payload = {"input_ids": [PROMPT] * 3, "sampling_params": params, "return_logprob": True}
    replies = served.client.generate({**payload, "lora_path": [names[1], names[0], names[1]]}, timeout=300)
    assert [reply["meta_info"]["weight_version"] for reply in replies] == ["22", "21", "22"]
    replies = served.client.generate(payload, timeout=300)
    assert [reply["meta_info"]["weight_version"] for reply in replies] == ["22"] * 3


def test_another_adapter_is_served_beside_those_that_are_pushed(served: Served) -> None:
    served.push(0, 31)
    served.push(1, 32)
    reply = served.generate(lora_path="judge")
    expected = Reference(served.merged[2]).log_probs(PROMPT, list(reply["output_ids"]))
    assert (output_log_probs(reply) - expected).abs().max() < 1e-4
    served.assert_is_of(served.generate(), served.merged[1], "32")

"""The log-prob server: what its ranks compute in every layout, and the whole of it over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from slime.utils.network import get_free_port
from tests.support.distributed import run_distributed
from tests.support.run_train import ROOT, Run
from tests.support.trainer import tiny_checkpoint

pytestmark = pytest.mark.integration
MODULE = "slime.backends.megatron_utils.server.megatron_server"
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"tensor_model_parallel_size": 2},
    {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    {"pipeline_model_parallel_size": 2},
    {"context_parallel_size": 2},
]
TOKENS = [[1, 2, 3, 4, 5, 6, 7], [9, 8], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21], [5, 5, 5]]


TEMPERATURE = 0.7


def distributions(checkpoint: Path | str, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Return the log-probs [n - 1, vocabulary] of every next token by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0, :-1]
    return (logits / temperature).log_softmax(-1)


def labels_of(tokens: list[int]) -> list[list[int]]:
    return [[(7 * i) % 300, 383, 0] for i in range(len(tokens) - 1)]


def test_ranks_of_every_layout_reply_as_transformers(tmp_path: Path) -> None:
    """Requests with and without labels and draws in one batch; draws do not depend on the layout."""
    checkpoint = tiny_checkpoint(tmp_path / "model", seed=0)
    requests: list[dict[str, Any]] = [
        {"tokens": TOKENS[0], "labels": labels_of(TOKENS[0])},
        {"tokens": TOKENS[1]},
        {"tokens": TOKENS[2], "labels": labels_of(TOKENS[2]), "draws": 3, "seed": 5},
        {"tokens": TOKENS[3], "draws": 1, "seed": 6},
    ]
    layouts = [{**layout, "rollout_temperature": TEMPERATURE} for layout in LAYOUTS]
    arguments = {"checkpoint": str(checkpoint), "layouts": layouts, "requests": requests}
    ranks = run_distributed("tests.support.log_prob_ranks:replies", 2, arguments)
    drawn = []
    for layout in range(len(LAYOUTS)):
        pairs = [pair for rank in ranks for pair in rank[layout]]
        found = {position: reply for position, reply in pairs if position < len(requests)}
        assert sorted(found) == [0, 1, 2, 3]
        assert len(pairs) == len(requests)  # one rank replies, not each that has computed it
        for position, request in enumerate(requests):
            reply, expected = found[position], distributions(checkpoint, request["tokens"], TEMPERATURE)
            rows = torch.arange(len(expected))
            of_tokens = expected[rows, torch.tensor(request["tokens"][1:])]
            np.testing.assert_allclose(reply.log_probs, of_tokens, atol=1e-5)
            labels = torch.tensor(request.get("labels", [[]] * len(expected)), dtype=torch.int64)
            np.testing.assert_allclose(reply.label_log_probs, expected.gather(1, labels), atol=1e-5)
            assert reply.sampled_ids.shape == (len(expected), request.get("draws", 0))
            ids = torch.from_numpy(reply.sampled_ids)
            np.testing.assert_allclose(reply.sampled_log_probs, expected.gather(1, ids), atol=1e-5)
        drawn.append([found[position].sampled_ids.tolist() for position in (2, 3)])
    assert all(one == drawn[0] for one in drawn)


class Server:
    """A client of a server in progress."""

    def __init__(self, run: Run, port: int, checkpoint: Path, other: Path) -> None:
        self.run, self.checkpoint, self.other = run, checkpoint, other
        self.url = f"http://127.0.0.1:{port}"
        self.key = (run.run_dir / "api_key").read_text().strip()
        self.headers = {"Authorization": f"Bearer {self.key}"}

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=self.headers, timeout=60)

    def post(self, path: str, body: object) -> httpx.Response:
        return httpx.post(self.url + path, headers=self.headers, json=body, timeout=60)

    def log_probs(self, tokens: list[int]) -> list[float]:
        reply = self.post("/generate", {"input_ids": tokens})
        assert reply.status_code == 200, reply.text
        found: list[float] = reply.json()["log_probs"]
        return found


def of_tokens(checkpoint: Path, tokens: list[int]) -> list[float]:
    found: list[float] = distributions(checkpoint, tokens)[torch.arange(len(tokens) - 1), tokens[1:]].tolist()
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("server")
    checkpoint, other = Path(tiny_checkpoint(root / "model", seed=0)), Path(tiny_checkpoint(root / "other", seed=1))
    port = get_free_port()
    words = f"""--hf-checkpoint {checkpoint} --actor-num-gpus-per-node 2 --use-dynamic-batch-size
        --max-tokens-per-gpu 64 --megatron-server-max-length 200 --num-rollout 7 --kl-coef 0.1 --use-kl-loss"""
    with Run(words.split(), root / "run", module=[MODULE], env={"TEACHER_PORT": str(port)}) as run:
        run.wait_for("log-probs of ", 240)
        yield Server(run, port, checkpoint, other)
        run.send(signal.SIGTERM)
        assert run.process.wait(60) == 143
        run.assert_nothing_left()


def test_replies(server: Server) -> None:
    assert server.get("/detect").json() == {"server_type": "megatron_server"}
    assert httpx.get(server.url + "/healthz").json() == {"ok": True}
    assert server.get("/info").json()["args"]["hf_checkpoint"] == str(server.checkpoint)
    assert server.key not in server.get("/info").text
    body = {"input_ids": TOKENS[0], "sample_n": 2, "label_token_ids": labels_of(TOKENS[0])}
    reply = server.post("/generate", body).json()
    expected = distributions(server.checkpoint, TOKENS[0])
    assert len(reply.pop("request_id")) == 32
    assert reply.keys() == {"log_probs", "sampled_token_ids", "sampled_log_probs", "label_token_log_probs"}
    assert reply["log_probs"] == pytest.approx(of_tokens(server.checkpoint, TOKENS[0]), abs=1e-5)
    labels, ids = torch.tensor(labels_of(TOKENS[0])), torch.tensor(reply["sampled_token_ids"])
    np.testing.assert_allclose(reply["label_token_log_probs"], expected.gather(1, labels), atol=1e-5)
    np.testing.assert_allclose(reply["sampled_log_probs"], expected.gather(1, ids), atol=1e-5)
    assert server.log_probs([3]) == []


def test_requests_at_once_each_have_their_reply(server: Server) -> None:
    """More tokens than fit the ranks at once, of lengths from 2 to 120."""
    sequences = [[(7 * i + 3 * j) % 384 for j in range(2 + 13 * i % 119)] for i in range(24)]

    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(headers=server.headers, timeout=120) as client:
            return await asyncio.gather(
                *(client.post(f"{server.url}/generate", json={"input_ids": ids}) for ids in sequences)
            )

    for ids, reply in zip(sequences, asyncio.run(ask()), strict=True):
        assert reply.json()["log_probs"] == pytest.approx(of_tokens(server.checkpoint, ids), abs=2e-5)
    loads = server.get("/get_loads").json()
    assert loads.pop("running_by_worker") == {"0": 0, "1": 0}
    assert set(loads.values()) == {0}


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/generate", [], 400, "expected an object"),
        ("/generate", {}, 400, "input_ids: expected a list of token ids, got NoneType"),
        ("/generate", {"input_ids": []}, 400, "at least one token"),
        ("/generate", {"input_ids": [1, 384]}, 400, "token ids from 0 to 383, got 384"),
        ("/generate", {"input_ids": [1, True]}, 400, "got True"),
        ("/generate", {"input_ids": [1, 2], "sample_n": -1}, 400, "sample_n"),
        ("/generate", {"input_ids": [1] * 5000, "sample_n": 1000}, 400, "ask in parts"),
        ("/generate", {"input_ids": [1, 2], "label_token_ids": [[1], [2]]}, 400, "expected 1 lists"),
        ("/generate", {"input_ids": [1, 2, 3], "label_token_ids": [[1], [2, 3]]}, 400, "as many ids"),
        ("/generate", {"input_ids": [1, 2], "label_token_ids": [[-1]]}, 400, "label_token_ids[0]"),
        ("/generate", {"input_ids": [1, 2], "image_data": ["x"]}, 400, "no images"),
        ("/generate", {"input_ids": [1, 2], "sampling_params": {"temperature": 0.5}}, 400, "--rollout-temperature 1"),
        ("/generate", {"input_ids": [1] * 201}, 413, "--megatron-server-max-length 200"),
        ("/update_weights_from_disk", {"path": "/nowhere"}, 400, "no directory"),
        ("/update_weights_from_disk", {"path": "/"}, 400, "neither a Megatron checkpoint"),
        ("/update_weights_from_disk", {"path": "/tmp", "timeout_s": 0}, 400, "timeout_s"),
        ("/update_weights_from_disk", {}, 400, "model_path"),
    ],
)
def test_what_is_refused(server: Server, path: str, body: object, status: int, words: str) -> None:
    reply = server.post(path, body)
    assert reply.status_code == status
    assert words in reply.json()["error"]


def test_without_the_key_there_is_no_answer_but_the_health(server: Server) -> None:
    for path in ("/detect", "/info", "/get_loads"):
        assert httpx.get(server.url + path).status_code == 401
    for path in ("/generate", "/update_weights_from_disk"):
        assert httpx.post(server.url + path, json={"input_ids": [1, 2]}).status_code == 401


def test_weights_are_replaced_by_those_of_a_checkpoint(server: Server, tmp_path: Path) -> None:
    path = "/update_weights_from_disk"
    assert server.post(path, {"model_path": str(server.other)}).json() == {"ok": True, "path": str(server.other)}
    assert server.log_probs(TOKENS[0]) == pytest.approx(of_tokens(server.other, TOKENS[0]), abs=1e-5)
    assert server.post(path, {"load": str(server.other)}).json()["skipped"]
    larger = tiny_checkpoint(tmp_path / "larger", seed=0, intermediate_size=96)
    refused = server.post(path, {"path": str(larger)})
    assert (refused.status_code, "another architecture" in refused.text) == (400, True)
    assert server.log_probs(TOKENS[0]) == pytest.approx(of_tokens(server.other, TOKENS[0]), abs=1e-5)
    assert server.post(path, {"path": str(server.checkpoint)}).json()["ok"]


def test_it_is_a_teacher_for_distillation(server: Server) -> None:
    """In a process as the rollout manager's, which sends keys to the servers that it knows."""
    program = f"""
import asyncio, json
from slime.rollout.on_policy_distillation import post_process_rewards, reward_func
from slime.servers import http_utils
from slime.utils import run_key
from slime.utils.types import Sample
from tests.support.rollout_args import rollout_args
run_key.install()
args = rollout_args(rm_url="{server.url}/generate", rollout_request_timeout=60.0)
http_utils.init_http_client(args)
sample = Sample(index=0, tokens={TOKENS[0]}, response_length=4)
sample.reward = asyncio.run(reward_func(args, sample))
post_process_rewards(args, [sample])
print(json.dumps(sample.teacher_log_probs))
"""
    env = {**os.environ, "SLIME_SERVER_KEYS": json.dumps({server.url: server.key})}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == pytest.approx(of_tokens(server.checkpoint, TOKENS[0])[-4:], abs=1e-5)

"""``slime serve`` with two models: each answers for itself, and engines come and go under one of them."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
import yaml
from openai import OpenAI

from tests.integration.test_loop_elastic_engines import engines, server_of
from tests.integration.test_serve import PAGE, wait_until
from tests.support.engines import Reference
from tests.support.run_train import Run
from tools.tiny_model import make_tiny_checkpoint

__all__ = ["engines"]  # a fixture
pytestmark = [pytest.mark.integration, pytest.mark.soak]
PROMPT = list(range(20, 40))
DEADLINE_S = 480.0


def file_of_the_page(folder: Path, paths: dict[str, Path]) -> Path:
    """The page's file, with checkpoints that are here and a slot for each model."""
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    found = yaml.safe_load(text)
    assert [model["name"] for model in found["sglang"]] == list(paths)
    for model in found["sglang"]:
        model["model_path"] = str(paths[model["name"]])
        model.pop("num_gpus_per_engine", None)
        (group,) = model["server_groups"]
        group["num_gpus"] = 1
        group.get("overrides", {}).pop("context_length", None)
    path = folder / "engines.yaml"
    path.write_text(yaml.safe_dump(found))
    return path


def best_of(reference: Reference) -> float:
    """The log-prob of the likeliest token after ``PROMPT``."""
    with torch.no_grad():
        logits = reference.model(torch.tensor([PROMPT])).logits[0, -1]
    return float(torch.log_softmax(logits.float(), dim=-1).max())


def serving(run: Run) -> dict[str, list[str]]:
    """By model, the states of its engines."""
    found: dict[str, Any] = json.loads((run.run_dir / "serving.json").read_text())["models"]
    return {name: [engine["state"] for engine in model["engines"]] for name, model in found.items()}


@pytest.mark.timeout(2400)
def test_two_models(tmp_path: Path, engines: Callable[..., str]) -> None:
    paths = {
        "policy": make_tiny_checkpoint(tmp_path / "policy"),
        "judge": make_tiny_checkpoint(tmp_path / "judge", seed=7, num_hidden_layers=1),
    }
    flags = ["--sglang-config", str(file_of_the_page(tmp_path, paths)), "--rollout-max-engines", "2"]
    with Run(flags, tmp_path / "run", module=("slime", "serve")) as run:
        run.wait_for(r"^judge .* regular +1 +serving$", DEADLINE_S)
        table = engines(run, "list")
        key = (run.run_dir / "api_key").read_text().strip()
        auth = {"Authorization": f"Bearer {key}"}
        routers = dict(re.findall(r"^(policy|judge) +(http://\S+) ", table, re.MULTILINE))

        def check(model: str, reference: Reference) -> None:
            """The model's own answer; a request may meet an engine that has just died."""
            body = {
                "input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1, "temperature": 0}, "return_logprob": True
            }  # fmt: skip
            replies: list[requests.Response] = []

            def is_answered() -> bool:
                replies.append(requests.post(f"{routers[model]}/generate", json=body, headers=auth, timeout=DEADLINE_S))
                return replies[-1].status_code == 200

            wait_until(is_answered, run, DEADLINE_S)
            ((log_prob, *_),) = replies[-1].json()["meta_info"]["output_token_logprobs"]
            assert log_prob == pytest.approx(best_of(reference), abs=1e-5)
            client = OpenAI(base_url=f"{routers[model]}/v1", api_key=key, max_retries=5)
            messages: Any = [{"role": "user", "content": "1+1="}]
            reply = client.chat.completions.create(model=model, messages=messages, max_tokens=4)
            assert reply.usage is not None
            assert 0 < reply.usage.completion_tokens <= 4

        references = {name: Reference(path) for name, path in paths.items()}
        for model, reference in references.items():
            check(model, reference)

        first = server_of(run, 1, table)
        assert engines(run, "add", "--model", "judge") == "being started: engine 2\n"
        wait_until(lambda: serving(run)["judge"] == ["serving"] * 2, run, DEADLINE_S)
        os.kill(first, signal.SIGKILL)
        check("judge", references["judge"])
        wait_until(lambda: serving(run)["judge"][0] != "serving", run, DEADLINE_S)
        check("judge", references["judge"])
        wait_until(lambda: serving(run)["judge"] == ["serving"] * 2, run, DEADLINE_S)
        assert engines(run, "remove", 1) == "removed: engine 1\n"
        check("judge", references["judge"])
        check("policy", references["policy"])
        assert "0 engines would be left, fewer than --rollout-min-engines 1" in engines(run, "remove", 0, status=1)
        run.send(signal.SIGTERM)
        finished = run.finish(60.0)
        assert finished.returncode == 143, finished.output
        run.assert_nothing_left(5.0)

"""``slime serve`` as a user runs it: a deployment that answers, loses its engine, and is stopped."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from slime.servers.engine_client import EngineClient
from tests.support.imports import ROOT
from tests.support.run_train import Run, command_line
from tools.tiny_model import make_tiny_checkpoint

pytestmark = pytest.mark.integration

START_DEADLINE_S = 120.0
REPLY_DEADLINE_S = 60.0
LONG = 3000
"""Tokens that a fast machine needs several seconds for: the start of the drain takes less."""
PAGE = ROOT / "docs" / "en" / "advanced" / "serve.md"


def deployment(run: Run) -> dict[str, Any]:
    """Return the entry of the one model in the run directory."""
    found: dict[str, Any] = json.loads((run.run_dir / "serving.json").read_text())["models"]["default"]
    return found


def ask(router: str, key: str, **changes: Any) -> requests.Response:
    message = {"role": "user", "content": "1+1="}
    body = {"model": "default", "messages": [message], "max_tokens": 8, "ignore_eos": True, **changes}
    headers = {"Authorization": f"Bearer {key}"}
    return requests.post(f"{router}/v1/chat/completions", json=body, headers=headers, timeout=REPLY_DEADLINE_S)


def ask_as_the_page_does(router: str, run: Run) -> None:
    """Run the page's program, with OpenAI's client."""
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert program.count("http://127.0.0.1:30000/v1") == 1
    assert program.count("runs/serving") == 1
    names: dict[str, Any] = {}
    exec(program.replace("http://127.0.0.1:30000", router).replace("runs/serving", str(run.run_dir)), names)
    reply = names["reply"]
    assert 0 < reply.usage.completion_tokens <= 64
    assert reply.choices[0].finish_reason in ("length", "stop")


def tokens_of(reply: requests.Response) -> int:
    assert reply.status_code == 200, reply.text
    return int(reply.json()["usage"]["completion_tokens"])


def wait_until(condition: Callable[[], bool], run: Run, deadline_s: float) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s:\n{run.output}{run.logs()}"
        time.sleep(0.05)


def server_of_engine(run: Run) -> int:
    """The process of the engine that answers HTTP."""
    lines = {pid: command_line(pid) for pid in run.processes()}
    servers = [p for p, line in lines.items() if "sglang.launch_server" in line and "process_supervisor" not in line]
    return servers[0]


def test_a_deployment_from_start_to_end(tmp_path: Path) -> None:
    model = make_tiny_checkpoint(tmp_path / "model", max_position_embeddings=8192)
    flags = ["--hf-checkpoint", str(model)]
    with Run(flags, tmp_path / "run", module=("slime", "serve")) as run:
        run.wait_for(r"^default .* regular +1 +serving$", START_DEADLINE_S)
        shown = deployment(run)
        router = shown["router"]
        ask_as_the_page_does(router, run)
        key_file = run.run_dir / "api_key"
        assert key_file.stat().st_mode & 0o777 == 0o600
        key = key_file.read_text().strip()
        assert ask(router, "EMPTY").status_code == 401

        # An engine that is lost is restarted behind the same router.
        lost = server_of_engine(run)
        os.kill(lost, signal.SIGKILL)
        run.wait_for(rf"\(pid {lost}, .* was ended by signal 9", 60.0)
        wait_until(lambda: deployment(run)["engines"][0]["state"] != "serving", run, REPLY_DEADLINE_S)
        wait_until(lambda: deployment(run)["engines"][0]["state"] == "serving", run, START_DEADLINE_S)
        assert deployment(run)["router"] == router
        engine = deployment(run)["engines"][0]["url"]
        assert tokens_of(ask(router, key)) == 8

        # After SIGTERM what is in flight is answered in full, and nothing else is accepted.
        with ThreadPoolExecutor(1) as pool:
            long = pool.submit(ask, router, key, max_tokens=LONG)
            wait_until(lambda: EngineClient(engine, key).num_requests() > 0, run, REPLY_DEADLINE_S)
            run.send(signal.SIGTERM)
            run.wait_for("draining: no more requests are accepted", REPLY_DEADLINE_S)
            wait_until(lambda: ask(router, key).status_code == 503, run, REPLY_DEADLINE_S)
            assert not long.done()
            assert tokens_of(long.result(REPLY_DEADLINE_S)) == LONG
        finished = run.finish(60.0)
        assert finished.returncode == 143, finished.output
        assert "not answered" not in finished.output
        run.assert_nothing_left(5.0)
        assert not (run.run_dir / "serving.json").exists()

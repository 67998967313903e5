"""The benchmark of the control plane runs, and measures what it says; its engines have addresses of their own."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import scaling
from slime.rollout.requests.engines import EngineLoads, describe_engines
from slime.rollout.requests.generate_request import append_output
from slime.servers import http_utils
from slime.servers.http_client import HttpClient
from slime.utils.types import Sample
from tests.support.arguments import run_args
from tests.support.standin.many import make_answer
from tests.support.standin.process import standin_process, stats

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


async def test_one_process_plays_many_engines(monkeypatch):
    http = HttpClient(16, request_timeout=10.0)
    monkeypatch.setattr(http_utils, "_http_client", http)
    with standin_process("--engines", 300, "--mean-seconds", 1000, module="tests.support.standin.many") as url:
        urls = await http.list_workers(url)
        assert len(set(urls)) == 300
        held = asyncio.create_task(http.post(f"{url}/generate", {"input_ids": [1], "rid": "held"}))
        engines = EngineLoads(lambda: url)
        while sum(load.running for load in await engines.read()) != 1:
            await asyncio.sleep(0.01)
        assert engines.listed == 300
        assert (await describe_engines(url)).endswith("; and 292 more engines")
        for engine in urls:
            await http.post(f"{engine}/abort_request", {"rid": "held"})
        assert (await held)["meta_info"]["finish_reason"]["type"] == "abort"
        counts = await asyncio.to_thread(stats, url)
        assert (counts["requests"], counts["aborts"], counts["in_flight"]) == (1, 300, 0)
        await http.close()


def test_an_answer_has_the_fields_of_the_wire_format():
    reply = json.loads(make_answer(random.Random(0), 5))
    sample = Sample(tokens=[1, 2])
    append_output(run_args(), sample, reply)
    assert sample.tokens == [1, 2, *reply["output_ids"]]
    assert (sample.status, sample.response_length, len(sample.response)) == (Sample.Status.COMPLETED, 5, 20)


def test_a_tiny_run():
    words = ["--one", "--engines", "3", "--per-engine", "2", "--groups", "6", "--samples", "2", "--tokens", "8"]
    command = [sys.executable, "-m", "benchmarks.scaling", *words, "--ranks", "2", "--rate", "200"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["engines"], result["groups"]) == (3, 6)
    assert result["us_per_request"] == pytest.approx(8 * result["us_per_token"])
    assert 0 < result["most_in_flight"] <= 6
    assert result["ready_s"] > 0
    assert result["journal_bytes_per_token"] > 4
    assert result["journal_left_out"] == 0
    assert result["stored_bytes_per_token"] > 9


def test_the_curves_and_the_table(capsys):
    run = dict.fromkeys((*scaling.COLUMNS, "groups"), 3.0)
    results = {8: [run, {**run, "us_per_token": 3.3}], 2048: [{**run, "us_per_token": 4.5}] * 2}
    scaling.print_table(results)
    assert capsys.readouterr().out.splitlines()[-1].endswith("1.43 [1.43, 1.43]")
    drawn = scaling.svg(results)
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    assert "CPU per token: 1.43 x (4.50 us)" in drawn

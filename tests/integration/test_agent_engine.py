"""The gateway in front of a real engine and router: tokens, log-probs, streaming, aborts."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from asyncio import to_thread
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import requests
import torch

from slime.agent.adapters import OpenAIAdapter
from slime.agent.trajectory import TurnRecord
from slime.servers.loads import num_requests_from_load
from slime.utils.network import find_available_port
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample
from tests.support.agents import served
from tests.support.engines import Reference, engine_and_router, engine_args
from tests.support.rollout_buffers import ServedBuffer
from tools.tiny_model import make_tiny_checkpoint

pytestmark = pytest.mark.integration
BASE = Sample(index=1, group_index=0, rollout_id=5)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    root: Path = tmp_path_factory.mktemp("agent_engine")
    checkpoint = make_tiny_checkpoint(root / "model")
    args = engine_args(checkpoint)
    with engine_and_router(args, root) as (engine, router):
        router.add_engine(engine.info)
        yield SimpleNamespace(
            url=router.url,
            client=engine.client(),
            tokenizer=load_tokenizer(str(checkpoint)),
            reference=Reference(checkpoint),
        )


async def test_samples_hold_what_the_engine_saw_and_made(setup):
    turns: list[TurnRecord] = []
    adapter = OpenAIAdapter(
        tokenizer=setup.tokenizer, sglang_url=setup.url, debug_callback=lambda *seen: turns.append(seen[-1])
    )
    adapter.open_session("s", sampling_defaults={"temperature": 1.0, "max_new_tokens": 24})
    with served(adapter) as handle:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{handle.port}/v1", api_key="s", max_retries=0)
        messages = [{"role": "user", "content": "1+1="}]
        async with client:
            for question in ("2+2=", "3+3="):
                stream = await client.chat.completions.create(model="tiny", messages=messages, stream=True)
                said = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": question}]
        samples = await adapter.finish_session("s", base_sample=BASE, reward=1.0)
    assert len(turns) == 2
    for turn in turns:
        assert 0 < len(turn.output_ids) <= 24
        expected = setup.reference.log_probs(list(turn.prompt_ids), list(turn.output_ids))
        assert torch.allclose(torch.tensor(turn.output_log_probs), expected, atol=1e-5)
    # what the tiny model writes is rarely text that is encoded to the same tokens again: one sample, or one per turn
    assert 1 <= len(samples) <= 2
    assert samples[-1].tokens == [*turns[-1].prompt_ids, *turns[-1].output_ids]
    for sample in samples:
        assert (sample.rollout_id, sample.reward, sample.status) == (5, 1.0, Sample.Status.COMPLETED)
        cut = len(sample.tokens) - sample.response_length
        expected = setup.reference.log_probs(sample.tokens[:cut], sample.tokens[cut:])
        mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
        assert torch.allclose(torch.tensor(sample.rollout_log_probs)[mask], expected[mask], atol=1e-5)
        assert setup.tokenizer.decode(sample.tokens[cut:]) == sample.response
        assert sample.weight_versions


async def test_the_gateway_command_writes_what_the_engine_made(setup, tmp_path):
    port = find_available_port(20000)
    with ServedBuffer() as buffer, (tmp_path / "gateway.log").open("wb") as log:
        command = [sys.executable, "-m", "slime.agent.serve", "--engine", setup.url, "--sink", buffer.url]
        gateway = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            opened = await to_thread(
                post,
                f"{url}/sessions",
                {"instance_id": "a", "sampling_params": {"max_new_tokens": 16}},
                headers=buffer.headers,
            )
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=opened["session_id"], max_retries=0) as client:
                items: list[Any] = [{"role": "user", "content": "1+1="}]
                for _ in range(3):
                    async with client.responses.stream(model="tiny", input=items) as stream:
                        items += (await stream.get_final_response()).output
                    items.append({"role": "user", "content": "2+2="})
            finish = f"{url}/sessions/{opened['session_id']}/finish"
            finished = await to_thread(post, finish, {"reward": 0.5}, headers=buffer.headers)
        finally:
            gateway.terminate()
            gateway.wait(60)
        [item], _ = buffer.buffer.queue.read()
    assert (item["uid"], item["instance_id"], item["reward"]) == (opened["session_id"], "a", 0.5)
    assert len(item["samples"]) == finished["samples"]
    for sample in item["samples"]:
        cut = len(sample["tokens"]) - sample["response_length"]
        expected = setup.reference.log_probs(sample["tokens"][:cut], sample["tokens"][cut:])
        mask = torch.tensor(sample["loss_mask"], dtype=torch.bool)
        assert torch.allclose(torch.tensor(sample["rollout_log_probs"])[mask], expected[mask], atol=1e-5)


def post(url: str, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
    """The answer, once the server listens."""
    for _ in range(600):
        try:
            return requests.post(url, json=body, headers=headers, timeout=120).json()
        except requests.ConnectionError:
            time.sleep(0.2)
    raise TimeoutError(url)


async def test_a_session_that_is_dropped_leaves_nothing_on_the_engine(setup):
    def on_engine() -> int:
        return num_requests_from_load(setup.client.loads())

    async def wait_for(condition) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.05)

    adapter = OpenAIAdapter(tokenizer=setup.tokenizer, sglang_url=setup.url)
    # no token ends it, so that it is still in progress when it is cut off
    adapter.open_session("s", sampling_defaults={"max_new_tokens": 900, "ignore_eos": True})
    with served(adapter) as handle:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{handle.port}/v1", api_key="s", max_retries=0)
        async with client:
            messages = [{"role": "user", "content": "on and on"}]
            turn = asyncio.create_task(client.chat.completions.create(model="tiny", messages=messages))
            await wait_for(lambda: on_engine() == 1)
            await adapter.drop_session("s", wait_timeout=0.0)
            with pytest.raises(openai.InternalServerError, match="session closed"):
                await turn
        await wait_for(lambda: on_engine() == 0)
    assert not adapter.manager.has_session("s")

"""A generate function for whole runs: two turns through the gateway, the parity of the answer as reward."""

from __future__ import annotations

import uuid
from typing import Any

import openai

from slime.agent.adapters import OpenAIAdapter
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.rollout.sglang_rollout import GenerateState, get_model_url
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample


class Gateway(metaclass=SingletonMeta):
    """Never gives up an answer: where the prompt tells it differently, a new sample begins."""

    def __init__(self, args: Any) -> None:
        self.adapter = OpenAIAdapter(
            tokenizer=GenerateState(args).tokenizer,
            sglang_url=get_model_url(args, "default", ""),
            fork_threshold_tokens=0,
            args=args,
        )
        self.handle = run_app_in_thread(self.adapter.app, host="127.0.0.1")


async def two_turns(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Ask, then ask again; one sample, or two where the answer is not rendered as the same tokens again.

    Every other session speaks the Responses API, with streams.
    """
    gateway = Gateway(args)
    sid = uuid.uuid4().hex
    gateway.adapter.open_session(sid, sampling_defaults=sampling_params)
    messages: list[Any] = list(sample.prompt)
    url = f"http://127.0.0.1:{gateway.handle.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=sid, max_retries=0) as client:
        for _ in range(2):
            if sample.index % 2:
                async with client.responses.stream(model="actor", input=messages) as stream:
                    answer = await stream.get_final_response()
                said, turn = answer.output_text, answer.output
            else:
                reply = await client.chat.completions.create(model="actor", messages=messages)
                said = reply.choices[0].message.content
                turn = [{"role": "assistant", "content": said}]
            messages += [*turn, {"role": "user", "content": "once more"}]
    return await gateway.adapter.finish_session(sid, base_sample=sample, reward=float(len(said) % 2))

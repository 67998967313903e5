"""The parts of strands-agents 1.62.0 and strands-sglang 0.4.3 that ``examples.strands_sglang`` uses, if not installed.

Names, signatures and the order of events are theirs: a prompt segment and a response segment for every turn, the
separator between messages, a tool's error as its result, the limit that is raised when a tool's result arrives, and
the exceptions in which the loop wraps what is raised.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import aiohttp


class EventLoopException(Exception):
    def __init__(self, original_exception: Exception, request_state: Any = None) -> None:
        super().__init__(str(original_exception))
        self.original_exception = original_exception


class MaxTokensReachedException(Exception):
    pass


class ContextWindowOverflowException(Exception):
    pass


class LoopLimitReachedError(Exception):
    pass


class LoopLimiter:
    def __init__(self, max_tool_iters: int | None = None) -> None:
        self.max_tool_iters, self.tool_iter_count = max_tool_iters, 0

    def on_tool_result(self) -> None:
        self.tool_iter_count += 1
        if self.max_tool_iters is not None and self.tool_iter_count >= self.max_tool_iters:
            raise LoopLimitReachedError(f"Max tool iterations ({self.max_tool_iters}) reached")


class Rollout:
    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.loss_mask: list[int] = []
        self.logprobs: list[float | None] = []
        self.segment_info: list[tuple[bool, int]] = []

    def add(self, ids: list[int], logprobs: list[Any] | None, is_output: bool) -> None:
        self.token_ids += ids
        self.loss_mask += [int(is_output)] * len(ids)
        self.logprobs += logprobs or [None] * len(ids)
        self.segment_info.append((is_output, len(ids)))

    @property
    def initial_prompt_length(self) -> int:
        return self.segment_info[0][1] if self.segment_info else 0


class SGLangModel:
    def __init__(self, *, client: Any, tokenizer: Any, tool_parser: Any = None, **config: Any) -> None:
        self.client, self.tokenizer, self.config, self.rollout = client, tokenizer, config, Rollout()

    def _render(self, messages: list[dict[str, Any]], generation: bool = True) -> str:
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation))

    def prompt(self, new: list[dict[str, Any]]) -> list[int]:
        """The whole prompt the first time; then only new messages, after the text that follows a response."""
        if not self.rollout.token_ids:
            return list(self.tokenizer.encode(self._render(new), add_special_tokens=False))
        fake = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
        probe = self._render([fake[1], {"role": "assistant", "content": "__M__"}], False).partition("__M__")[2]
        separator = self.tokenizer.decode(self.tokenizer.encode(probe, add_special_tokens=False)[1:])
        text = separator + self._render(fake + new)[len(self._render(fake, False)) :]
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    async def turn(self, new: list[dict[str, Any]]) -> tuple[str, str]:
        ids = self.prompt(new)
        params = {**self.config["sampling_params"], "skip_special_tokens": False}
        reply = await self.client.generate(
            input_ids=self.rollout.token_ids + ids, sampling_params=params, return_logprob=True,
            logprob_start_len=max(0, len(self.rollout.token_ids) - 1),
        )  # fmt: skip
        meta = reply["meta_info"]
        self.rollout.add(ids, None, False)
        self.rollout.add(reply["output_ids"], [entry[0] for entry in meta["output_token_logprobs"]], True)
        return reply["text"], meta["finish_reason"]["type"]


class Agent:
    def __init__(
        self,
        *,
        model: SGLangModel,
        tools: list[Any],
        system_prompt: str | None,
        callback_handler: Any,
        hooks: list[Any],
    ) -> None:
        self.model, self.system, self.hooks = model, system_prompt, hooks
        self.tools = {tool.__name__: tool for tool in tools}

    async def invoke_async(self, prompt: str) -> Any:
        try:
            return await self._loop(prompt)
        except (EventLoopException, MaxTokensReachedException, ContextWindowOverflowException):
            raise
        except Exception as e:
            raise EventLoopException(e) from e

    async def _loop(self, prompt: str) -> Any:
        new = [{"role": "system", "content": self.system}] if self.system else []
        new.append({"role": "user", "content": prompt})
        while True:
            text, reason = await self.model.turn(new)
            if reason == "length":
                raise MaxTokensReachedException("max tokens")
            calls = re.findall(r"<tool_call>\s*(.*?)\s*</tool_call>", text, re.DOTALL)
            if not calls:
                return SimpleNamespace(stop_reason="end_turn")
            new = [{"role": "tool", "content": await self._call(call)} for call in calls]
            for hook in self.hooks:
                hook.on_tool_result()

    async def _call(self, text: str) -> str:
        try:
            call = json.loads(text)
            return str(await self.tools[call["name"]](**call["arguments"]))
        except Exception as e:  # noqa: BLE001  (the model is shown it)
            return f"Error: {e}"


class Client:
    def __init__(self, base_url: str, timeout: float) -> None:
        self.base_url, self.timeout = base_url, timeout

    async def generate(self, input_ids: list[int], **request: Any) -> Any:
        timeout = aiohttp.ClientTimeout(self.timeout)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            body = {"input_ids": input_ids, **request, "stream": False}
            async with session.post(f"{self.base_url}/generate", json=body) as reply:
                reply.raise_for_status()
                return await reply.json()


def get_client_from_slime_args(args: Any, *, timeout: float = 900.0) -> Client:
    assert args.sglang_server_concurrency * args.rollout_num_gpus // args.rollout_num_gpus_per_engine > 0
    return Client(f"http://{args.sglang_router_ip}:{args.sglang_router_port}", timeout)


def ensure_strands() -> None:
    """Put stand-ins into ``sys.modules`` where the packages are not installed; the example imports them again."""
    if "strands" in sys.modules or importlib.util.find_spec("strands_sglang") is not None:
        return
    contents = {
        "strands": {"Agent": Agent, "tool": lambda function: function},
        "strands.types": {},
        "strands.types.exceptions": {
            one.__name__: one for one in (ContextWindowOverflowException, EventLoopException, MaxTokensReachedException)
        },
        "strands_sglang": {
            one.__name__: one for one in (LoopLimiter, LoopLimitReachedError, SGLangModel, get_client_from_slime_args)
        },
    }
    for name, names in contents.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(names)
    if example := sys.modules.get("examples.strands_sglang.generate"):
        importlib.reload(example)

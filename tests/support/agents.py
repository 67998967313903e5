"""A tokenizer whose template has tools and reasoning, engines that answer from a script, and a gateway before them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from slime.agent.adapters import BaseAdapter
from slime.agent.aiohttp_threaded import AppHandle, run_app_in_thread
from slime.agent.trajectory import TurnRecord
from slime.agent.turn_experts import TurnExperts
from slime.utils.types import Sample
from tests.support.standin import StandInCluster

BEGIN, END = "\ue000", "\ue001"
"""One token each, as all characters are: the beginning and the end of a message."""


class ToolTokenizer:
    """One token per character, its code point."""

    eos_token_id = ord(END)
    all_special_ids = (ord(BEGIN), ord(END))

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(i) for i in ids if not (skip_special_tokens and i in self.all_special_ids))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def apply_chat_template(
        self, messages: list[dict], *, tools: Any = None, tokenize: bool = False, add_generation_prompt: bool = False
    ) -> Any:
        text = f"{BEGIN}tools {' '.join(tool['function']['name'] for tool in tools)}{END}" if tools else ""
        text += "".join(f"{BEGIN}{message['role']}\n{said(message)}{END}" for message in messages)
        text += f"{BEGIN}assistant\n" if add_generation_prompt else ""
        return {"input_ids": self.encode(text)} if tokenize else text


def said(message: dict[str, Any]) -> str:
    """A message as the template writes it: what a model that wrote it would have written."""
    thought = f"<think>{message['reasoning_content']}</think>" if message.get("reasoning_content") else ""
    calls = "".join(call_text(**call["function"]) for call in message.get("tool_calls") or [])
    return thought + message["content"] + calls


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """A tool call in the format that is parsed without SGLang."""
    values = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


@dataclass
class Script:
    """Answers with its lines in turn, each ended as a model ends its message; keeps the prompts."""

    lines: list[str] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)

    def __call__(self, input_ids: list[int], params: dict[str, Any]) -> list[int]:
        self.prompts.append("".join(map(chr, input_ids)))
        return [ord(c) for c in self.lines[len(self.prompts) - 1] + END]


@contextmanager
def scripted_engine(*lines: str, **options: Any) -> Iterator[StandInCluster]:
    """An engine and a router that answer with these lines."""
    with StandInCluster(1, reply=Script(list(lines)), **options) as cluster:
        yield cluster


@contextmanager
def served(adapter: BaseAdapter) -> Iterator[AppHandle]:
    """The gateway on a thread of its own."""
    handle = run_app_in_thread(adapter.app, host="127.0.0.1")
    try:
        yield handle
    finally:
        handle.stop()


@contextmanager
def gateway(kind: type[BaseAdapter], *lines: str, seconds: float = 0.0, **options: Any) -> Iterator[SimpleNamespace]:
    """A gateway with an open session ``s``, before an engine that says these lines and takes ``seconds`` for each."""
    with scripted_engine(*lines) as cluster:
        cluster.engines[0].duration = lambda ids: seconds
        adapter = kind(tokenizer=ToolTokenizer(), sglang_url=cluster.router.url, **options)
        adapter.open_session("s", sampling_defaults={"temperature": 0.7, "max_new_tokens": 400})
        with served(adapter) as handle:
            url = f"http://127.0.0.1:{handle.port}"
            engine = cluster.engines[0]
            yield SimpleNamespace(adapter=adapter, url=url, engine=engine, script=engine.reply, cluster=cluster)


def trained_text(sample: Sample) -> list[str]:
    """The stretches of the response that are trained, as text."""
    cut = len(sample.tokens) - sample.response_length
    marked = "".join(chr(t) if m else "\0" for t, m in zip(sample.tokens[cut:], sample.loss_mask, strict=True))
    return [stretch for stretch in marked.split("\0") if stretch]


def read_by(turn: TurnRecord, number: int) -> TurnRecord:
    """``turn`` with its ``number`` as the expert of every token that it read."""
    rows = np.full((len(turn.prompt_ids) + len(turn.output_ids) - 1, 1, 1), number)
    return replace(turn, experts=TurnExperts(rows))


def check_experts(samples: list[Sample], read: list[list[int]]) -> None:
    """The experts of a token, which are the number of a turn here, are of one that read just the tokens up to it; and
    those of tokens before a trained one are not of turns after that in which it was made, whose ids are its own."""
    for sample in samples:
        experts = sample.rollout_routed_experts[:, 0, 0].tolist()
        assert len(experts) == len(sample.tokens) - 1
        for place, number in enumerate(experts):
            assert read[number][: place + 1] == sample.tokens[: place + 1]
        for place in range(len(sample.tokens) - sample.response_length, len(sample.tokens)):
            if sample.loss_mask[place - len(sample.tokens)]:
                made_in = next(k for k, tokens in enumerate(read) if sample.tokens[place] in tokens)
                assert max(experts[:place]) <= made_in

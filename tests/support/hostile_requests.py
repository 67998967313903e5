"""Requests to every endpoint of gateway and buffer, each changed somewhere, and what no server may answer."""

from __future__ import annotations

import copy
import http.client
import json
import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from slime.agent.adapters import common, http_requests
from slime.agent.serve import Gateway
from slime.servers import bounded_site
from slime.utils.bounded_log import BoundedLog
from slime_plugins.rollout_buffer import buffer as buffer_module
from tests.support.agents import END, ToolTokenizer, served
from tests.support.rollout_buffers import ServedBuffer
from tests.support.standin import StandInCluster

KEY = "control"
TOOL = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
PARAMS = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop": ["x"], "max_new_tokens": 8, "logit_bias": {"1": 2.0}}
RECORD = {"tokens": [5, 6, 7], "response_length": 2, "loss_mask": [1, 0], "rollout_log_probs": [-0.5, 0.0],
          "metadata": {"truncated": False}, "weight_versions": ["1"], "response": "ab"}  # fmt: skip
ITEM = {"uid": "u", "instance_id": "i", "reward": 1.0, "extra_info": {"finish_reason": "stop", "tools": [TOOL]},
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "m", "temperature": 1.0, "top_p": 0.5, "max_tokens": 4, "n": 1, "seed": 3, "stop": ["x", "y"],
        "logit_bias": {"5": 1}, "presence_penalty": 0.5, "frequency_penalty": 0.5, "stream": False,
        "metadata": {"session_id": "s"}, "user": "s",
        "messages": [
            {"role": "system", "content": "sys"}, {"role": "user", "content": [{"type": "text", "text": "q"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ],
        "tools": [{"type": "function", "function": {"name": "add", "parameters": TOOL}}],
    },
    "/v1/responses": {
        "model": "m", "instructions": "be", "max_output_tokens": 4, "temperature": 1.0, "top_p": 0.5,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
        ],
        "tools": [{"type": "function", "name": "add", "parameters": TOOL}],
    },
    "/v1/messages": {
        "model": "m", "max_tokens": 4, "system": [{"type": "text", "text": "sys"}], "stop_sequences": ["x"],
        "temperature": 1.0, "top_k": 5, "metadata": {"user_id": "user_a_account__session_s"},
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "2"}]},
        ],
        "tools": [{"name": "add", "input_schema": TOOL}],
    },
    "/sessions": {"instance_id": "i", "session_id": "new", "max_context_tokens": 100, "sampling_params": PARAMS},
    "/sessions/{sid}/finish": {"reward": 1.0, "extra_info": {"a": 1}},
    "/buffer/write": {**ITEM, "samples": [RECORD, RECORD]},
    "/buffer/write ": ITEM,
    "/get_rollout_data": {"wait_s": 0, "acknowledged": 3},
    "/start_rollout": {"task_type": "external", "num_repeat_per_sample": 2, "vocab_size": 2**20, "reward_key": "score",
                       "input_file": "f", "skip_instance_ids": ["1"], "sampling_params": {"max_tokens": 3}},
}  # fmt: skip
BODIES["/v1/messages/count_tokens"] = BODIES["/v1/messages"]
OF_BUFFER = ("/buffer/write", "/get_rollout_data", "/start_rollout")
SCALARS: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2**31, 2**62, 2**63, -(2**63), 10**30, 1e308, -1e-300, 5.5, "", "x",
    "\x00", "\x7f\r\nA: b", "x" * 5000, [], {}, [None], [[]], {"a": None}, [1, "a", {}], "<tool_call>", "\u2028",
)  # fmt: skip
RAW = (
    b"NaN", b"Infinity", b"-Infinity", b"1e400", b'"\\ud800"', b'"\\udfff\\ud800"', b"[" * 3000, b"1" * 500, b"\xff",
    b"{'a': 1}",
)  # fmt: skip
"""Not JSON, or no JSON that can be taken: but for the long number, which is one."""
ALWAYS_WRONG = tuple(raw for raw in RAW if raw != b"1" * 500)
HOLE = "\u0000hole\u0000"


@dataclass
class Hostile:
    """One request, and whether it must be refused."""

    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    is_wrong: bool = False


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places(one, (*at, key))


def with_value(body: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    changed = copy.deepcopy(body)
    holder = changed
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    return changed


def hostile(rng: random.Random) -> Hostile:
    """Return a request that is changed in one way."""
    path = rng.choice(sorted(BODIES))
    body = BODIES[path]
    place = rng.choice(list(places(body)))
    kind = rng.randrange(8)
    if kind <= 3:
        changed = with_value(body, place, rng.choice(SCALARS))
        if kind == 3 and isinstance(changed, dict) and changed:
            changed.pop(rng.choice(sorted(changed)))
        return Hostile(path, json.dumps(changed).encode())
    if kind == 4:
        raw = rng.choice(RAW)
        data = json.dumps(with_value(body, place, HOLE)).encode().replace(json.dumps(HOLE).encode(), raw, 1)
        return Hostile(path, data, is_wrong=raw in ALWAYS_WRONG)
    data = bytearray(json.dumps(body).encode())
    if kind == 5:
        del data[rng.randrange(len(data)) :]
        return Hostile(path, bytes(data), is_wrong=True)
    if kind == 6:
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        return Hostile(path, bytes(data))
    encoding, sent = rng.choice(
        [("gzip", bytes(data)), ("deflate", bytes(data)), ("br", bytes(data)), ("zstd", bytes(data)),
         ("gzip", zlib.compress(data)), ("deflate", zlib.compress(data)[:-5]),
         ("deflate", zlib.compress(b"[" * 200_000))]
    )  # fmt: skip
    return Hostile(path, sent, {"Content-Encoding": encoding}, is_wrong=True)


def check_params(params: dict[str, Any]) -> None:
    """Assert what a scheduler needs of sampling parameters, whose numbers become tensors of 32 bits."""
    for name, value in params.items():
        if isinstance(value, float):
            assert abs(value) < 3e38, (name, value)
        elif isinstance(value, int):
            assert -(2**31) <= value < 2**31, (name, value)
    assert 0 <= params.get("temperature", 1) < 1000
    assert 0 < params.get("top_p", 1) <= 1
    assert params.get("top_k", -1) == -1 or params["top_k"] >= 1
    assert params["max_new_tokens"] >= 1
    stops = params.get("stop") or []
    assert all(isinstance(stop, str) and len(stop) < 10_000 for stop in ([stops] if isinstance(stops, str) else stops))


class _NoProcess:
    """In the place of a generator at work."""

    def __init__(self, module: ModuleType, data: dict[str, Any]) -> None:
        self.module = module
        json.dumps(data)

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def wait(self) -> int:
        return 0

    def state(self) -> dict[str, Any]:
        return {"state": "running"}


@contextmanager
def doors() -> Iterator[SimpleNamespace]:
    """A buffer, and a gateway before an engine that checks what it is asked for: ``send(hostile) -> status``."""

    def reply(ids: list[int], params: dict[str, Any]) -> list[int]:
        check_params(params)
        return [ord(c) for c in f"ok{END}"]

    with (
        pytest.MonkeyPatch.context() as patch,
        StandInCluster(1, reply=reply) as cluster,
        ServedBuffer(key=KEY) as buffer,
    ):
        patch.setattr(buffer_module, "GeneratorProcess", _NoProcess)
        patch.setattr(buffer_module, "LONGEST_WAIT_S", 0.001)
        for module in (http_requests, common, bounded_site):  # other tests want their own warnings
            patch.setattr(module, "told", BoundedLog(module.logger))
        gateway = Gateway(sink=buffer.url, key=KEY, tokenizer=ToolTokenizer(), sglang_url=cluster.router.url)
        with served(gateway) as handle:
            ports = {True: int(buffer.url.rsplit(":", 1)[1]), False: handle.port}
            links = {side: http.client.HTTPConnection("127.0.0.1", port, timeout=30) for side, port in ports.items()}

            def send(one: Hostile) -> int:
                path, token = one.path.strip(), KEY
                gateway.unsent.clear()
                if "s" not in gateway.store:
                    gateway.open_session("s", sampling_defaults={"max_new_tokens": 8})
                gateway.instances["s"] = "i"
                if path.startswith("/v1/"):
                    token = "s"
                path = path.replace("{sid}", "s")
                headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json", **one.headers}
                link = links[one.path.startswith(OF_BUFFER)]
                link.request("POST", path, one.body, headers)
                answer = link.getresponse()
                answer.read()
                return answer.status

            yield SimpleNamespace(send=send, gateway=gateway, buffer=buffer, cluster=cluster)
            for link in links.values():
                link.close()

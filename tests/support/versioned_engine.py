"""Stand-in engines that know which weights made which token, apart from what they report."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from tests.support.standin import StandInCluster, StandInEngine
from tests.support.standin.wire import Request, Response


@dataclass
class Weights:
    """The weights that all engines hold, and every token made with them: its log-prob is minus its serial number."""

    version: int = 0
    made: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Serial number -> (token, version)."""
    serials: Any = field(default_factory=lambda: itertools.count(1))
    last_gate: int = 0
    gate_turns: int = 200
    gated: bool = False
    """Up to version ``last_gate`` one request at a time waits, after two tokens, for newer weights or its abort: so
    some live through pushes, however fast the machine is. For a moment only, since a rollout may wait for it."""

    def forget(self, keep: int) -> None:
        """Forget all but the last tokens."""
        for serial in list(self.made)[:-keep]:
            del self.made[serial]


@dataclass
class VersionedEngine(StandInEngine):
    """Makes one token per turn of its event loop. With ``says_spans`` replies say what SGLang's say, otherwise only the
    version at the end of the request. ``rate`` of the requests fail; ``length`` draws the tokens of a response."""

    weights: Weights = field(default_factory=Weights)
    says_spans: bool = True
    length: Callable[[], int] = lambda: 8
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    rate: float = 0.0
    lost: Counter[str] = field(default_factory=Counter)

    async def _generate(self, request: Request) -> Response | None:
        body = orjson.loads(request.body)
        fate = self.rng.random()
        if fate < self.rate:
            self.lost["unavailable" if fate < self.rate / 2 else "cut"] += 1
            return Response(503) if fate < self.rate / 2 else None
        rid = body.get("rid") or f"anonymous-{next(self.weights.serials)}"
        stop = self.running[rid] = asyncio.Event()
        try:
            return Response.of_json(await self._make(body, stop, request.lost))
        finally:
            del self.running[rid]

    async def _make(self, body: dict[str, Any], stop: asyncio.Event, lost: asyncio.Event) -> dict[str, Any]:
        limit = body["sampling_params"]["max_new_tokens"]
        wanted = self.length()
        serials: list[int] = []
        has_waited = False
        while len(serials) < min(wanted, limit) and not stop.is_set() and not lost.is_set():
            await asyncio.sleep(0)
            if self.paused:
                await asyncio.sleep(0.001)
                continue
            may_wait = not self.weights.gated and self.weights.version < self.weights.last_gate
            if may_wait and not has_waited and len(serials) == 2 < wanted:
                await self._wait_for_a_push(stop, lost)
                has_waited = True
                continue
            serial = next(self.weights.serials)
            self.weights.made[serial] = (self.rng.randint(97, 122), self.weights.version)
            serials.append(serial)
        kind = "abort" if stop.is_set() else "stop" if len(serials) == wanted else "length"
        tokens, versions = [self.weights.made[s][0] for s in serials], [self.weights.made[s][1] for s in serials]
        meta = {
            "finish_reason": {"type": kind},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(tokens),
            "weight_version": str(versions[-1] if versions else self.weights.version),
            "output_token_logprobs": [[-float(s), t, None] for s, t in zip(serials, tokens, strict=True)],
        }
        if self.says_spans:
            meta["weight_versions"] = [
                {"version": str(version), "start": versions.index(version), "end": versions.index(version) + count}
                for version, count in sorted(Counter(versions).items())
            ] or [{"version": str(self.weights.version), "start": 0, "end": 0}]
        return {"text": "".join(map(chr, tokens)), "output_ids": tokens, "meta_info": meta}

    async def _wait_for_a_push(self, stop: asyncio.Event, lost: asyncio.Event) -> None:
        self.weights.gated, version = True, self.weights.version
        for _ in range(self.weights.gate_turns):
            if self.weights.version != version or stop.is_set() or lost.is_set():
                break
            await asyncio.sleep(0.001)
        self.weights.gated = False


class VersionedCluster(StandInCluster):
    """Versioned engines that share their weights."""

    def __init__(self, count: int = 2, seed: int = 0, **options: Any) -> None:
        super().__init__(0)
        self.weights = Weights()
        self.engines = [
            VersionedEngine(weights=self.weights, record=False, rng=random.Random(seed * 1000 + i), **options)
            for i in range(count)
        ]
        self.router.engines = list(self.engines)

    def push(self, version: int, mode: str = "retract") -> None:
        """Give every engine new weights, as a push does: pause (``abort`` ends what runs), load, continue."""

        async def update() -> None:
            for engine in self.engines:
                engine.paused = True
                if mode == "abort":
                    engine._stop(None, everything=True)
            await asyncio.sleep(0.002)
            self.weights.version = version
            for engine in self.engines:
                engine.weight_version = str(version)
                engine.paused = False

        self.server.call(update())

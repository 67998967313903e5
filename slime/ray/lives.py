"""Watching processes that nobody waits for: while the actor trains, a critic that ends must not go unnoticed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray

from slime.ray.errors import describe
from slime.ray.waiting import Peer

PING_EVERY_S = 2.0


class Lives:
    """Whether the processes of ``actors``, which answer ``ping``, are there; ``peers`` name them in messages.

    One that works on something else answers later: only its end is a failure.
    """

    def __init__(self, actors: Sequence[Any], peers: Sequence[Peer]) -> None:
        self._actors, self._peers = list(actors), list(peers)
        self._pings: dict[Any, int] = {}
        self._asked = 0.0

    def check(self, what: str) -> None:
        """Raise RemoteFailure naming the process that has ended. ``what`` is being waited for meanwhile."""
        if self._pings:
            answered, _ = ray.wait(list(self._pings), num_returns=len(self._pings), timeout=0, fetch_local=False)
            for ref in answered:
                peer = self._peers[self._pings.pop(ref)]
                try:
                    ray.get(ref)
                except ray.exceptions.RayError as e:
                    raise describe(e, peer.name, what, peer.log) from None
        now = time.monotonic()
        if now - self._asked >= PING_EVERY_S:
            self._asked = now
            waiting = set(self._pings.values())
            for number, actor in enumerate(self._actors):
                if number not in waiting:
                    self._pings[actor.ping.remote()] = number

"""Engines that share their devices with the trainer release their memory while it is the trainer's turn."""

from __future__ import annotations

import time
from collections.abc import Iterable

from slime.ray.manager.engines.members import Member
from slime.servers.engine_client import EngineClient

TAGS = ("weights", "kv_cache", "cuda_graph")
"""The parts of an engine's memory."""
DRAIN_S, DRAIN_POLL_S = 30.0, 0.1


def release(member: Member, client: EngineClient) -> None:
    """Release what has not been released.

    A frozen model may be asked at any time, by rewards that no rollout waits for any more: what it works on has
    ``DRAIN_S`` to end, and what comes then waits until it has its memory again.
    """
    left = [tag for tag in TAGS if tag not in member.released]
    if not left:
        return
    if not member.engine.plan.update_weights:
        deadline = time.monotonic() + DRAIN_S
        while client.num_requests() and time.monotonic() < deadline:
            time.sleep(DRAIN_POLL_S)
        client.pause("abort")
    client.release_memory(*([left] if member.released else []))
    member.released = set(TAGS)


def resume(member: Member, client: EngineClient, tags: Iterable[str]) -> None:
    """Take back those parts in ``tags`` that are released.

    A frozen model needs its weights for nothing but generation: it takes them back with the rest, when the trainer has
    left the devices.
    """
    due = member.released.intersection(tags)
    frozen = not member.engine.plan.update_weights
    if frozen:
        due = due | (member.released & {"weights"}) if due - {"weights"} else set()
    if not due:
        return
    client.resume_memory(None if len(due) == len(TAGS) else [tag for tag in TAGS if tag in due])
    member.released = member.released - due
    if frozen and not member.released:
        client.resume()


def keep_weights_only(member: Member, client: EngineClient) -> None:
    """Bring a restarted engine to the state of the others before a push."""
    client.release_memory()
    client.resume_memory(["weights"])
    member.released = set(TAGS) - {"weights"}

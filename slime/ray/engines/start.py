"""The first start of all engines at once."""

from __future__ import annotations

from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

import ray

from slime.backends.sglang_utils.router import RouterProcess, RunningRouter
from slime.ray.engines.members import Members, State


def spans_one_host() -> bool:
    """True when the Ray cluster is one host: servers then listen on loopback."""
    return len({n["NodeID"] for n in ray.nodes() if n["Alive"]}) == 1


def start_all(members: Members, router: RouterProcess | RunningRouter) -> None:
    """Start every engine, wait for the router meanwhile, and send it requests for all of them.

    The first engine that fails ends the wait for the others, with its failure.
    """
    starting = members.all()
    pool = ThreadPoolExecutor(max(1, len(starting)), thread_name_prefix="start-engine")
    try:
        starts = [pool.submit(member.engine.start) for member in starting]
        router.wait_ready()
        for start in wait(starts, return_when=FIRST_EXCEPTION).done:
            start.result()
    finally:
        pool.shutdown(wait=False)
    for member, start in zip(starting, starts, strict=True):
        router.add_engine(start.result())
        members.started(member, start.result(), State.SERVING)

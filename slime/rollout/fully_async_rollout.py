"""Generation that never stops: groups are made across rollouts and weight syncs, each rollout takes what is ready.

For ``train_async.py``: ``--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async``.
"""

from __future__ import annotations

import atexit
import logging
import threading
from typing import Any

from slime.observability.progress import progress_bar
from slime.rollout import sglang_rollout
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.data_source import hand_back
from slime.rollout.groups import Group
from slime.rollout.stream.generation_stream import GenerationStream
from slime.rollout.train_rollout import run_rollout_hooks
from slime.utils.async_utils import get_async_loop, run
from slime.utils.moved import also_named

__all__ = ["AsyncRolloutWorker", "generate_rollout_fully_async", "get_global_worker", "stop_global_worker"]

logger = logging.getLogger(__name__)

WAITING_NOTE_S = 60.0
"""How often a rollout that waits for nothing but new weights logs it."""


class AsyncRolloutWorker:
    """Keeps groups of ``data_buffer`` in flight, at most ``concurrency``, and as many waiting to be consumed.

    It runs on the process's asyncio loop and has no thread of its own; methods may be called from any other thread.
    """

    def __init__(self, args: Any, data_buffer: Any, concurrency: int | None = None) -> None:
        self.args = args
        self.data_source = data_buffer
        self.stream = GenerationStream(args, data_buffer, concurrency)

    def start(self) -> None:
        """Begin to generate; consuming a rollout does so too."""
        get_async_loop().call_soon_threadsafe(self.stream.start)

    def stop(self) -> None:
        """Stop generating, abort what is in flight, and hand all that was not consumed back to the data source."""
        left = run(self.stream.stop())
        hand_back(self.data_source, left)

    def get_completed_groups(self, limit: int | None = None) -> list[tuple[int, Group]]:
        """Consume the oldest finished groups, at most ``limit``, as (running number, group); does not wait."""
        jobs = self.stream.ledger.completed.take(limit)
        self.stream.wake()
        return [(job.number, job.result or []) for job in jobs]

    def queue_size(self) -> int:
        """Return how many finished groups wait to be consumed."""
        return len(self.stream.ledger.completed)

    def unconsumed(self) -> list[Group]:
        """Return the groups that were drawn and not consumed: the data source saves them with its own state."""

        async def read() -> list[Group]:
            return self.stream.ledger.unconsumed()

        return run(read())

    async def rollout(self, rollout_id: int) -> RolloutFnTrainOutput:
        """Return the next ``rollout_batch_size`` groups, ordered by their first sample's index.

        An error, also of a hook, stops generation; the next call resumes it with the same groups.
        """
        self.stream.begin_rollout(rollout_id)
        try:
            await self._fill(rollout_id)
            dropped = list(self.stream.ledger.dropped)
            groups = [job.result or [] for job in self.stream.ledger.taken]
            get_samples = self.data_source.get_samples
            data = await run_rollout_hooks(self.args, groups, [*groups, *dropped], get_samples)
        except BaseException:
            await self.stream.suspend()
            raise
        return RolloutFnTrainOutput(samples=data, metrics=self.stream.end_rollout(len(dropped)))

    async def _fill(self, rollout_id: int) -> None:
        """Return when enough groups are taken."""
        stream, ledger, target = self.stream, self.stream.ledger, self.args.rollout_batch_size
        stall_s = 2.0 * self.args.rollout_request_timeout
        with progress_bar(f"rollout {rollout_id}", target, "group") as progress:
            while True:
                progress.update(stream.take(target), running=len(ledger.in_flight), ready=len(ledger.completed))
                done = len(ledger.taken)
                if done == target:
                    return
                if stream.is_exhausted:
                    raise RuntimeError(
                        f"rollout {rollout_id}: the data source has no more prompts; {done} of {target} groups are "
                        "done and none is in flight"
                    )
                busy = len(ledger.in_flight)
                if await stream.wait_for_change(stall_s if busy else WAITING_NOTE_S):
                    continue
                if busy:
                    raise TimeoutError(
                        f"rollout {rollout_id}: no group finished for {stall_s:g} s (2 x --rollout-request-timeout); "
                        f"{done} of {target} are done, {busy} in flight, the oldest: {stream.describe_oldest()}"
                    )
                logger.info(
                    "rollout %d waits for new weights: the engines have those of step %s, --max-staleness is %s, %d "
                    "groups are ahead", rollout_id, stream.clock.step, stream.bound.limit, ledger.ahead,
                )  # fmt: skip

    async def evaluate(self, rollout_id: int) -> RolloutFnEvalOutput:
        """Run the built-in evaluation. Groups in flight continue; new ones start in the slots that it leaves free."""
        return (await sglang_rollout.eval_rollout(self.args, rollout_id))[0]


_worker: AsyncRolloutWorker | None = None
_worker_lock = threading.Lock()


def get_global_worker(args: Any, data_source: Any) -> AsyncRolloutWorker:
    """Return the process's worker for ``data_source``; one for another data source is stopped first."""
    global _worker
    with _worker_lock:
        if _worker is not None and _worker.data_source is not data_source:
            _worker.stop()
            _worker = None
        if _worker is None:
            _worker = AsyncRolloutWorker(args, data_source)
        return _worker


def stop_global_worker() -> None:
    """Stop the process's worker, if there is one; the next rollout makes another."""
    global _worker
    with _worker_lock:
        worker, _worker = _worker, None
    if worker is not None:
        worker.stop()


atexit.register(stop_global_worker)


def unconsumed_groups() -> list[Group]:
    """Return the groups that the process's worker has drawn and not given to a rollout."""
    worker = _worker
    return [] if worker is None else worker.unconsumed()


@also_named(data_buffer="data_source")
def generate_rollout_fully_async(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """A ``--rollout-function-path`` that blocks only until enough groups are ready; generation continues afterwards."""
    worker = get_global_worker(args, data_source)
    if evaluation:
        return run(worker.evaluate(rollout_id))
    return run(worker.rollout(rollout_id))


# The rollout manager calls these of functions that always generate: to end them, and to save their groups.
generate_rollout_fully_async.stop = stop_global_worker  # type: ignore[attr-defined]
generate_rollout_fully_async.unconsumed = unconsumed_groups  # type: ignore[attr-defined]

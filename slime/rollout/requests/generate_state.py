"""Pieces of the state that the requests of one rollout process share."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from slime.arguments.args import Args
from slime.rollout.cancelling import cancel_all
from slime.rollout.requests.engines import num_engines_asked
from slime.rollout.rm_hub.errors import RewardErrors
from slime.rollout.rm_hub.failure import LateFailures
from slime.servers.http_utils import get_http_client
from slime.utils.network import connection_limit
from slime.utils.types import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    class RequestState(Protocol):
        """The attributes of ``GenerateState`` that a request reads."""

        tokenizer: PreTrainedTokenizerBase
        processor: Any
        aborted: bool

    class RolloutState(Protocol):
        """The attributes of ``GenerateState`` that a rollout reads and sets."""

        semaphore: asyncio.Semaphore
        pendings: set[Any]
        pending_rewards: PendingRewards
        remaining_batch_size: int
        aborted: bool
        on_completed: Callable[[list[Sample]], None] | None


logger = logging.getLogger(__name__)

DEFAULT_MAX_MASK_TOKENS = 4096
"""SGLang's own ``--sampling-mask-max-tokens``."""


def replays_top_p(args: Args) -> bool:
    """Return whether training rollouts record top-p masks: exactly with ``--rollout-top-p`` below 1."""
    return bool(args.rollout_top_p != 1.0)


def max_mask_tokens(args: Args) -> int:
    """Return the most tokens of a top-p mask that engines report."""
    return int(args.sglang_sampling_mask_max_tokens or DEFAULT_MAX_MASK_TOKENS)


def top_k(args: Args) -> int:
    """Return the ``top_k`` of training requests.

    Engines report masks only under a finite one below ``max_mask_tokens``. Where none is given it is half of that,
    which leaves room for ties; what it cuts off is not sampled, and so training leaves it out too.
    """
    given = int(args.rollout_top_k)
    return max_mask_tokens(args) // 2 if replays_top_p(args) and given == -1 else given


def train_sampling_params(args: Args) -> dict[str, Any]:
    """Return the engines' sampling parameters for training rollouts."""
    params: dict[str, Any] = {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": top_k(args),
        "max_new_tokens": args.rollout_max_response_len,
        "stop": args.rollout_stop,
        "stop_token_ids": args.rollout_stop_token_ids,
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    if replays_top_p(args):
        params["custom_params"] = {"return_top_p_token_ids": True}
    return params


def request_limit(args: Args) -> int:
    """Return how many requests may be in flight: ``--sglang-server-concurrency`` per engine, as far as the processes
    that send them can open connections."""
    wanted = max(1, int(args.sglang_server_concurrency) * max(1, num_engines_asked(args)))
    return min(wanted, get_http_client().concurrency) if args.use_distributed_post else connection_limit(wanted)


class PromptTokens:
    """Token ids of the latest prompts: the samples of a group, which begin together, have the same one."""

    KEPT = 16

    def __init__(self) -> None:
        self._tokenizer: Any = None
        self._ids: dict[str, list[int]] = {}

    def of(self, tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
        """Return the token ids of ``prompt``, a list of the caller's own."""
        if tokenizer is not self._tokenizer:
            self._tokenizer, self._ids = tokenizer, {}
        if prompt not in self._ids:
            if len(self._ids) >= self.KEPT:
                del self._ids[next(iter(self._ids))]
            self._ids[prompt] = tokenizer.encode(prompt, add_special_tokens=False)
        return list(self._ids[prompt])


class PendingRewards:
    """The rewards that are being computed. A rollout that ends leaves them pending; the next one that gets the same
    samples waits for them instead of computing them twice.
    """

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Task[Any], asyncio.Future[None]] = {}
        self._by_sample: dict[int, asyncio.Task[Any]] = {}
        self._leaving = False
        self._left: asyncio.Future[None] | None = None
        """Done when callers are to stop waiting."""

    def __len__(self) -> int:
        """Return the number of samples whose reward is being computed."""
        return len(self._by_sample)

    def begin(self) -> None:
        """Let callers wait for rewards from now on."""
        self._leaving, self._left = False, None

    def leave(self) -> None:
        """Let callers that wait for a reward, now or until ``begin``, continue without it."""
        self._leaving = True
        for waiter in (*self._waiters.values(), self._left):
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

    async def wait_for(self, reward: Coroutine[Any, Any, Any], samples: Iterable[Sample]) -> None:
        """Run ``reward``, which sets the rewards of ``samples``, to its end, or until it is left behind.

        Raises what it raises. A caller that is cancelled cancels the reward too.
        """
        loop = asyncio.get_running_loop()
        samples = list(samples)
        task = loop.create_task(reward)
        waiter = self._waiters[task] = loop.create_future()
        self._by_sample.update((id(sample), task) for sample in samples)
        task.add_done_callback(functools.partial(self._ended, samples))  # which keeps the samples, and their ids, alive
        if self._leaving:
            waiter.set_result(None)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                await cancel_all([task])
            raise
        if task.done():
            task.result()

    async def catch_up(self, samples: Iterable[Sample]) -> bool:
        """Wait for the pending rewards of ``samples``; the caller computes those that failed again.

        Returns False when they are left behind once more.
        """
        tasks = {task for sample in samples if (task := self._by_sample.get(id(sample))) is not None}
        if tasks and self._left is None:
            self._left = asyncio.get_running_loop().create_future()
        while tasks and self._left is not None and not self._leaving:
            await asyncio.wait({*tasks, self._left}, return_when=asyncio.FIRST_COMPLETED)
            tasks = {task for task in tasks if not task.done()}
        return not tasks

    def _ended(self, samples: list[Sample], task: asyncio.Task[Any]) -> None:
        for sample in samples:
            self._by_sample.pop(id(sample), None)
        waiter = self._waiters.pop(task)
        error = None if task.cancelled() else task.exception()
        if not waiter.done():
            waiter.set_result(None)
        elif error is not None:
            logger.warning("a reward that its rollout did not wait for failed, and is asked for again: %r", error)


@contextlib.contextmanager
def least_used(counts: list[int]) -> Iterator[int]:
    """Yield the index of the smallest count, which is one higher meanwhile."""
    chosen = min(range(len(counts)), key=counts.__getitem__)
    counts[chosen] += 1
    try:
        yield chosen
    finally:
        counts[chosen] -= 1


class Bookkeeping:
    """The rollout and the evaluation that are being made, and their rewards."""

    def __init__(self, args: Args | None = None) -> None:
        self.rollout_id: int | None = None
        self.reward_errors = RewardErrors(args)
        self.eval_rollout_id: int | None = None
        self.eval_reward_errors = RewardErrors()
        self.pending_rewards = PendingRewards()
        self.late_failures = LateFailures()
        self.prompt_tokens = PromptTokens()


@functools.cache
def _of_stand_ins() -> Bookkeeping:
    return Bookkeeping()


def bookkeeping_of(state: object) -> Bookkeeping:
    """Return the bookkeeping of ``state``: itself, or the one that all replacements in this process share."""
    return state if isinstance(state, Bookkeeping) else _of_stand_ins()

"""Groups that were given up, until it is known why: because of their prompt, or because a service is down."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import Counter, deque
from typing import Any

from slime.arguments.args import Args
from slime.arguments.files.environments import environments_of
from slime.arguments.rules.loop import ENVIRONMENT_GENERATE
from slime.rollout.groups import Group, GroupJob, is_complete, prompt_of
from slime.rollout.outages import Service, ServiceOutage, count_attempt, failed_attempts, given_up, service_of

logger = logging.getLogger(__name__)


class HeldGroups(ABC):
    """The part of a stream of groups that holds them, pauses while a service is down, and counts attempts.

    The rule is that of ``slime.rollout.outages``. ``counts`` go by the name of the metric, without ``rollout/``.
    """

    def __init__(self, args: Args) -> None:
        self.args = args
        self.waiting: deque[GroupJob] = deque()
        self.in_flight: dict[asyncio.Task[Any], GroupJob] = {}
        self.held: dict[str, list[GroupJob]] = {}
        """By service, since its last success."""
        self.counts: Counter[str] = Counter()
        self._services: dict[str, Service] = {}
        self._paused_for: str | None = None
        self._probe: asyncio.TimerHandle | GroupJob | None = None
        """The next try of the service that is down: the timer of one, or the group of one in progress."""
        self._tries_a_new_one = False

    @property
    def is_paused(self) -> bool:
        """True while a service is down: only probes of it begin."""
        return self._paused_for is not None

    def all_held(self) -> list[GroupJob]:
        """Return the held groups of all services."""
        return [job for jobs in self.held.values() for job in jobs]

    # What the stream does with a group

    @abstractmethod
    def _may_begin(self) -> bool:
        """True when a group may begin now."""

    @abstractmethod
    def _next_job(self) -> GroupJob | None:
        """Take the group that is to begin next; None where there is none."""

    @abstractmethod
    def _try_to_begin(self, job: GroupJob) -> None:
        """Begin to generate a group; what that raises stops the run."""

    @abstractmethod
    def _keep(self, job: GroupJob) -> None:
        """Take the result of a group."""

    @abstractmethod
    def _to_begin_again(self, job: GroupJob) -> Group:
        """Return the group as it is generated again: with ``partial_rollout`` from where it stopped."""

    @abstractmethod
    def _hand_back(self, job: GroupJob, group: Group) -> None:
        """Give a group back to the data source, to be drawn again."""

    @abstractmethod
    def stop_with(self, error: BaseException) -> None:
        """Remember what stops the run."""

    @abstractmethod
    def _notice(self) -> None:
        """Check again what may begin, and whether the run is to stop."""

    # Failures and successes

    def _service(self, job: GroupJob) -> str:
        path = self.args.custom_generate_function_path
        if path == ENVIRONMENT_GENERATE and len(names := environments_of(self.args)) == 1:
            return f"environment {next(iter(names))!r}"
        return service_of(job.original, f"generate function {path}" if path else "the generate function")

    def _hold(self, job: GroupJob, why: str) -> None:
        """Keep a group that failed until its service has succeeded with another one, or is down."""
        name = self._service(job)
        service = self._services.setdefault(name, Service(name, self.args.service_outage_timeout))
        held = self.held.setdefault(name, [])
        held.append(job)
        job.why = why
        job.was_held += 1
        new = sum(one.was_held == 1 and failed_attempts(one.original) == 0 for one in held)
        is_down = service.failed(why, new, len(self.in_flight))
        if is_down and (not self.is_paused or self._probe is job):
            self._pause(name)

    def _pause(self, name: str) -> None:
        """Begin nothing until a group of a service that is down succeeds; one is tried after a growing wait."""
        service = self._services[name]
        if not service.is_down:
            service.goes_down()
        self._paused_for = name
        try:
            self._probe = asyncio.get_running_loop().call_later(service.next_pause(), self._try_again, name)
        except ServiceOutage as outage:
            self._probe = None
            self.stop_with(outage)
            self._notice()

    def _try_again(self, name: str) -> None:
        """Ask the service with a group that has not failed, if one may begin, and with a held one in turn."""
        self.counts["service_outage/retries"] += 1
        self._tries_a_new_one = not self._tries_a_new_one
        try:
            job = self._next_job() if self._tries_a_new_one and self._may_begin() else None
        except Exception as e:  # noqa: BLE001  (what the data source raises stops the run)
            self.stop_with(e)
            self._notice()
            return
        if job is None and (held := self.held.get(name)):
            job = held.pop(0)
            if not held:
                del self.held[name]
        if job is None:
            self._end_pause()
            self._notice()
            return
        self._probe = job
        self._try_to_begin(job)
        if job not in self.in_flight.values():  # it was finished already, or did not begin
            self._probe_is_lost(job)
            self._notice()

    def _probe_is_lost(self, job: GroupJob) -> None:
        """Ask again when what a service was asked has ended, or has been taken back, without its answer."""
        if self._probe is job and self._paused_for is not None:
            self._pause(self._paused_for)

    def _answered(self, job: GroupJob) -> None:
        """A group succeeded: what its service failed before counts now, unless it was down."""
        name = self._service(job)
        held, service = self.held.pop(name, []), self._services.get(name)
        if service is None:
            return
        if service.is_down:
            self.waiting.extendleft(reversed(held))
            held = []
        service.answered()
        if self._paused_for == name:
            self._end_pause()
        for failed in held:
            group = self._to_begin_again(failed)
            attempts = count_attempt(group)
            if attempts < self.args.max_prompt_attempts:
                self._hand_back(failed, group)
            else:
                self._give_up(failed, group, attempts)

    def _give_up(self, job: GroupJob, group: Group, attempts: int) -> None:
        """Take a group as it is: what has no response or no reward trains nothing."""
        self.counts["given_up_groups"] += 1
        logger.warning(
            "%s is given up after %d attempts (--max-prompt-attempts), while others succeed: reward 0, left out of the "
            "loss. The last: %s", job.name(), attempts, job.why,
        )  # fmt: skip
        made = job.result or [job.ended.get(number, item) for number, item in enumerate(group)]
        job.result = [
            item if is_complete([item]) else given_up(prompt_of(drawn), self.args.reward_key, job.why)
            for item, drawn in zip(made, group, strict=True)
        ]
        self._keep(job)

    def _end_pause(self) -> None:
        if isinstance(self._probe, asyncio.TimerHandle):
            self._probe.cancel()
        self._probe = self._paused_for = None

    def _end_pauses(self) -> None:
        """Forget outages; what is held waits to begin again."""
        self._end_pause()
        self.waiting.extendleft(reversed(self.all_held()))
        self.held.clear()
        self._services.clear()

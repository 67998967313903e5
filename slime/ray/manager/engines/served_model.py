"""A model that a run serves: its router, and the engines behind it."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Sequence

from slime.arguments.args import Args
from slime.arguments.placement import EnginePlan, models_of
from slime.backends.sglang_utils.errors import RouterStartError
from slime.backends.sglang_utils.router import RouterProcess, RunningRouter
from slime.observability.run_dir import log_path
from slime.ray.manager.engines.members import EngineChangeError, Member, Members, State
from slime.servers.http import RouterError
from slime.utils import run_key
from slime.utils.network import _wrap_ipv6

logger = logging.getLogger(__name__)


ROUTER_RESTARTS = 20
"""Of one router; more have a cause that another start does not fix."""

ENDING_S = 1.0
"""Seconds that a router's process may take to end after its connections have."""


class RouterEndedError(RuntimeError):
    """A router has ended for good."""


class ServedModel:
    """The engines of ``plans`` behind their own router.

    ``update_weights``: they get the trainer's weights, and no request before. Those of a frozen model keep the weights
    of their checkpoint.
    """

    def __init__(self, name: str, plans: Sequence[EnginePlan], members: Members, *, update_weights: bool) -> None:
        self.name, self.plans, self.update_weights = name, list(plans), update_weights
        self.router: RouterProcess | RunningRouter | None = None
        self.router_restarts = 0
        self._members = members
        self._changes = threading.Lock()
        """Held while the router's engines, or the router, are being changed."""

    @property
    def running_router(self) -> RouterProcess | RunningRouter:
        assert self.router is not None, "the fleet has not been started"
        return self.router

    @property
    def address(self) -> tuple[str, int]:
        """Host, as plug-ins put it into a URL (an IPv6 address in brackets), and port of the router."""
        router = self.running_router
        assert router.port is not None, f"{router} has no port: it has not been started"
        return _wrap_ipv6(router.host), router.port

    def of(self, *states: State) -> list[Member]:
        """Return its engines in one of ``states``."""
        return self._members.of(*states, model=self.name)

    def answers(self, *states: State) -> bool:
        """Return True if its engines in one of ``states`` are enough to answer requests: one of each kind."""
        present = {member.engine.plan.worker_type for member in self.of(*states)}
        return present == {plan.worker_type for plan in self.plans}

    def example(self, worker_type: str | None) -> EnginePlan:
        """Return the plan of an engine of ``worker_type``, or of any. Raises EngineChangeError where there is none."""
        for plan in self.plans:
            if worker_type in (None, plan.worker_type):
                return plan
        kinds = ", ".join(sorted({plan.worker_type for plan in self.plans})) or "none"
        raise EngineChangeError(f"model {self.name} has no {worker_type or ''} engine to start another like: {kinds}")

    def register(self, member: Member) -> None:
        """Send requests to ``member``. Raises RouterError."""
        with self._changes:
            self.running_router.add_engine(member.known_info)
            run_key.add(member.known_info.url, member.known_info.api_key, member.known_info.admin_api_key)
            serves = self._members.change(member, (State.NEW,), State.SERVING)
        if not serves:  # it was lost or is to leave since
            self.deregister(member)

    def deregister(self, member: Member) -> None:
        """Send no more requests to ``member``."""
        with self._changes:
            if self.running_router.poll() is not None:
                return  # the next router does not get to know it
            try:
                self.running_router.remove_engine(member.known_info)
            except RouterError as e:
                logger.warning("%s stays on the router, which will find it dead: %s", member, e)

    def revive_router(self, stopping: threading.Event) -> list[tuple[Member, str]]:
        """Start the router again on its port if it has ended, with the engines that serve.

        Returns the engines that it continues without, each with the reason: those that have ended, and those that it
        refuses. What requests it held fail with their connections, and their senders send them again. Raises
        RouterEndedError when it does not start, takes none of those that run, or has ended more than
        ``ROUTER_RESTARTS`` times.
        """
        with self._changes:
            ended = self.running_router.poll()
            if ended is None or stopping.is_set():
                return []
            if self.router_restarts >= ROUTER_RESTARTS:
                raise RouterEndedError(ended)
            self.router_restarts += 1
            logger.error("%s\nIt is started again on its port, and the requests that it held are sent again.", ended)
            try:
                self.running_router.restart()
            except RouterStartError as e:
                raise RouterEndedError(f"{ended}\nIt could not be started again: {e}") from e
            taken = 0
            lost: list[tuple[Member, str]] = []
            refused: list[tuple[Member, str]] = []
            for member in self.of(State.SERVING):
                if (how := member.engine.poll()) is not None:  # together with the router, perhaps
                    lost.append((member, how))
                    continue
                try:
                    self.running_router.add_engine(member.known_info)
                    taken += 1
                except RouterError as e:
                    if self.router_has_ended():  # again: it is started at the next look
                        return lost
                    refused.append((member, member.describe_failure(f"it cannot join the router again. {e}")))
            if refused and not taken:
                raise RouterEndedError(f"{ended}\nIt was started again, and takes no engine:\n{refused[-1][1]}")
            logger.warning("%s was started again, with %d engines", self.running_router.name, taken)
            return lost + refused

    def router_has_ended(self) -> bool:
        """Return True if the router has ended, or ends now: connections are closed a moment before the process ends."""
        deadline = time.monotonic() + ENDING_S
        while self.running_router.poll() is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def recovery_message(self, lost: EnginePlan, *, restarts: bool) -> str:
        """Say how the run continues after the loss of an engine."""
        serving, of_model = len(self.of(State.SERVING)), "" if self.name == "default" else f" of model {self.name}"
        answers = self.answers(State.SERVING)
        remaining = (
            f"{serving} of {len(self.plans)} engines{of_model} continue; requests of the lost one are sent to them."
        )
        external = any(plan.url is not None for plan in self.plans)
        again = "attached again when it answers" if external else "restarted"
        if restarts:
            when = "from the next weight sync on" if self.update_weights else "as soon as it generates"
            last = f"{lost.kind}engine" if lost.kind else "one"
            outlook = remaining if answers else f"It was the last {last}{of_model} that served."
            return f"{outlook} It is {again}, and serves {when}."
        if answers:
            return f"{remaining} With --use-fault-tolerance it would be {again}."
        is_again = "an engine is attached again when it answers" if external else "engines are restarted"
        return f"No {lost.kind}engine{of_model} is left. With --use-fault-tolerance {is_again}."


def served_models(args: Args, plans: Sequence[EnginePlan], members: Members) -> list[ServedModel]:
    """Return the models of a run, the first of which rollouts ask; their routers are not started."""
    models = models_of(args)
    updated = {"default": True} if models is None else {model.name: bool(model.update_weights) for model in models}
    trains = not args.debug_rollout_only
    return [
        ServedModel(name, [plan for plan in plans if plan.model == name], members, update_weights=updates and trains)
        for name, updates in updated.items()
    ]


def named(models: Sequence[ServedModel], name: str | None) -> ServedModel:
    """Return the one of ``models`` with ``name``, or the first. Raises EngineChangeError where there is none."""
    for model in models:
        if name in (None, model.name):
            return model
    raise EngineChangeError(f"no model {name!r} is served; there are {', '.join(m.name for m in models)}")


def new_router(args: Args, model: ServedModel, host: str, *, is_first: bool) -> RouterProcess | RunningRouter:
    """Return the router of ``model``; the flags that say where one is, or is to be, are about the first model's."""
    if is_first and args.sglang_router_ip is not None:
        return RunningRouter(args)
    is_pd = any(plan.worker_type == "prefill" for plan in model.plans)
    if is_first:
        log = log_path(args, "router")
        return RouterProcess(args, host, args.sglang_router_port, log_path=log, pd_disaggregation=is_pd)
    log, name = log_path(args, f"router_{re.sub(r'[^A-Za-z0-9_.-]', '_', model.name)}"), f"router of model {model.name}"
    return RouterProcess(args, host, log_path=log, name=name, pd_disaggregation=is_pd, shares_flags=True)

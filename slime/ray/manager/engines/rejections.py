"""Engines whose answers cannot be trained on are found and taken off."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from slime.ray.manager.engines.members import Member, Members, State
from slime.ray.manager.engines.served_model import ServedModel
from slime.servers.engine_client import EngineClient
from slime.servers.http import EngineError
from slime.servers.http_replies import wrong_with

logger = logging.getLogger(__name__)

LIMIT, WINDOW_S = 3, 600.0
"""So many rejected answers of one engine within this time take it off."""
ASK_AGAIN_S = 5.0
"""Between two searches for the engine that gives wrong answers, where the router does not name it."""
ASK_TIMEOUT_S = 60.0
PROMPT, TOKENS = [1, 2, 3, 4, 5, 6, 7, 8], 4


class Rejections:
    """Counts rejected answers by engine; ``mark_dead(member, reason)`` is called for one that gives too many.

    Where the router does not say which engine answered, all engines of the model are asked for a few tokens each. That
    finds one whose weights are broken or old, and not one that is wrong now and then.
    """

    def __init__(
        self, members: Members, models: Sequence[ServedModel], mark_dead: Callable[[Member, str], None]
    ) -> None:
        self._members, self._models, self._mark_dead = members, models, mark_dead
        self._asked_at: dict[str, float] = {}
        self._lock = threading.Lock()

    def note(self, router_url: str, engine_url: str | None, wrong: str, oldest_version: int | None) -> None:
        """Count an answer that was rejected. Returns at once: what follows happens on a thread."""
        model = next((model for model in self._models if model.running_router.url == router_url), None)
        if model is None:
            return
        serving = model.of(State.SERVING)
        member = next((m for m in serving if m.known_info.url == engine_url), None)
        now, count = time.monotonic(), 0
        with self._lock:
            self._members.rejected_of[model.name] += 1
            if member is not None:
                member.rejected.append(now)
                count = sum(now - at < WINDOW_S for at in member.rejected)
            ask = engine_url is None and now - self._asked_at.get(model.name, -ASK_AGAIN_S) >= ASK_AGAIN_S
            if ask:
                self._asked_at[model.name] = now
        who = engine_url or f"an engine behind {router_url}" if member is None else f"{member} ({engine_url})"
        logger.warning("an answer of %s is not used, and its request is sent again: %s", who, wrong)
        if member is not None and count >= LIMIT:
            reason = f"{count} of its answers could not be used, the last: {wrong}"
            _begin(lambda: self._mark_dead(member, member.describe_failure(reason)))
        elif ask:
            _begin(lambda: self._ask_all(serving, oldest_version))

    def _ask_all(self, members: Sequence[Member], oldest_version: int | None) -> None:
        with ThreadPoolExecutor(max(1, len(members))) as pool:
            found = list(pool.map(lambda m: _wrong_answer(m, oldest_version), members))
        for member, wrong in zip(members, found, strict=True):
            if wrong is not None:
                reason = f"answers came that could not be used, and its answer to a check cannot either: {wrong}"
                self._mark_dead(member, member.describe_failure(reason))


def _begin(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="rejected-answers", daemon=True).start()


def _wrong_answer(member: Member, oldest_version: int | None) -> str | None:
    """Return what is wrong with what the engine generates; None also for one that does not answer."""
    info = member.known_info
    payload = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True},
        "return_logprob": True,
    }
    try:
        return wrong_with(EngineClient.of(info).generate(payload, ASK_TIMEOUT_S), oldest_version)
    except EngineError as e:
        logger.debug("%s does not answer the check of its answers: %s", member, e)
        return None

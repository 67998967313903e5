"""Asking an engine whether it still works. The answers are None, or what is wrong."""

from __future__ import annotations

from slime.servers.engine_client import EngineClient
from slime.servers.errors import EngineError
from slime.servers.types import EngineInfo

ANSWER_TIMEOUT_S, ANSWER_ATTEMPTS = 10.0, 3
"""An engine is asked so often, with so much time each, before it is taken not to answer."""


def why_unhealthy(info: EngineInfo, timeout: float) -> str | None:
    """Return why the engine does not generate within ``timeout`` s. Not to be asked while it is paused or offloaded."""
    try:
        _client(info).health_generate(timeout)
    except EngineError as e:
        return str(e)
    return None


def why_silent(info: EngineInfo) -> str | None:
    """Return why the engine does not answer at all, also when paused. A reply of any kind is an answer."""
    error = None
    for _ in range(ANSWER_ATTEMPTS):
        try:
            _client(info).loads(timeout=ANSWER_TIMEOUT_S)
        except EngineError as e:
            if e.status is not None:
                return None
            error = str(e)
        else:
            return None
    return error


def _client(info: EngineInfo) -> EngineClient:
    return EngineClient(info.url, api_key=info.api_key)

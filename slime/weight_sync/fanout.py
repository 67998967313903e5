"""Call all engines at once and name the one that failed."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from slime.backends.megatron_utils.state.parallel import first_error
from slime.servers.http import EngineTimeoutError

T = TypeVar("T")


_LATE = "no answer within"


def engines_that_hang(message: str) -> dict[str, str]:
    """Return the engines that a WeightSyncError's text says were late: URL -> what they did not do."""
    what = re.search(r"Weight sync could not (.*) on \d+ of \d+ engines:", message)
    late = re.findall(rf"^ *(\S+): {_LATE}", message, re.MULTILINE)
    return dict.fromkeys(late, f"could not {what[1] if what else 'take the weights'}")


class WeightSyncError(RuntimeError):
    """A push of weights that did not reach every engine; the engines' weights must be regarded as unknown."""


def failed(what: str, failures: Sequence[str], engines: int) -> WeightSyncError:
    """Return the error of a step that failed on some of the engines, one line each."""
    return WeightSyncError(
        f"Weight sync could not {what} on {len(failures)} of {engines} engines:\n  "
        + "\n  ".join(failures)
        + "\nThe weights of the engines are unknown now; see the engines' logs under the run directory."
    )


def late(url: str, deadline_s: float) -> str:
    """Return the line of an engine that did not answer in time."""
    return f"{url}: {_LATE} {deadline_s:.0f} s (--weight-sync-timeout)"


def agree(error: Exception | None) -> None:
    """Collective over the trainer: raise ``WeightSyncError`` on every rank when any of them has an ``error``.

    What fails on one rank must end the push on all, in the same place: otherwise the others wait for it for ever.
    """
    mine = None
    if error is not None:
        mine = str(error) if isinstance(error, WeightSyncError) else f"{type(error).__name__}: {error}"
    first = first_error(mine)
    if first is not None:
        raise error if isinstance(error, WeightSyncError) else WeightSyncError(first) from error


def attempt(step: Callable[[], Any]) -> None:
    """Do ``step`` on this rank while the others do theirs; raise ``WeightSyncError`` on all when it fails on one."""
    error = None
    try:
        step()
    except Exception as e:  # noqa: BLE001  (raised by agree, on every rank)
        error = e
    agree(error)


class FanOut:
    """A pool of threads, one per engine, that makes the same blocking call on every engine client."""

    def __init__(self, clients: Sequence[Any]) -> None:
        self.clients = list(clients)
        self._pool = ThreadPoolExecutor(max(1, len(self.clients)), thread_name_prefix="weight-sync")

    def start(self, call: Callable[[Any], T]) -> list[Future[T]]:
        """Begin ``call(client)`` for every engine and return the futures in engine order."""
        return [self._pool.submit(call, client) for client in self.clients]

    def wait(self, futures: list[Future[T]], what: str, deadline_s: float) -> list[T]:
        """Return all results; raise ``WeightSyncError`` naming every engine that failed or is late.

        Args:
            futures: what ``start`` returned.
            what: the step, for the message ("flush the prefix cache").
            deadline_s: seconds for the slowest engine.
        """
        results, failures = [], []
        end = time.monotonic() + deadline_s
        for client, future in zip(self.clients, futures, strict=True):
            try:
                results.append(future.result(timeout=max(0.0, end - time.monotonic())))
            except TimeoutError:
                failures.append(late(client.url, deadline_s))
            except EngineTimeoutError as error:
                failures.append(f"{client.url}: {_LATE} its deadline: {error}")
            except Exception as error:  # noqa: BLE001 - collected, named and raised below
                failures.append(f"{client.url}: {type(error).__name__}: {error}")
        if failures:
            raise failed(what, failures, len(self.clients))
        return results

    def call(self, what: str, call: Callable[[Any], T], deadline_s: float) -> list[T]:
        """``start`` and ``wait`` in one."""
        return self.wait(self.start(call), what, deadline_s)

    def close(self) -> None:
        """Stop taking calls; threads that still wait for an engine end with their own timeouts."""
        self._pool.shutdown(wait=False, cancel_futures=True)

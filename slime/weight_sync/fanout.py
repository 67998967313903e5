"""Call all engines at once and name the one that failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from slime.backends.megatron_utils.state.parallel import gather_from_world
from slime.servers.http import EngineTimeoutError
from slime.utils.structured_error import ErrorData, StructuredError, data_of, merged

T = TypeVar("T")


class WeightSyncError(StructuredError):
    """A push of weights that did not reach every engine; the engines' weights must be regarded as unknown."""


class Failure(NamedTuple):
    """One engine's part in a step that failed; ``late``: it did not answer."""

    url: str
    reason: str
    late: bool = False
    data: ErrorData | None = None


def failed(what: str, failures: Sequence[Failure], engines: int) -> WeightSyncError:
    """Return the error of a step that failed on some of the engines, one line each; its data names the late ones."""
    hanging = {failure.url: f"could not {what}" for failure in failures if failure.late}
    own = ErrorData(hanging=hanging) if hanging else ErrorData()
    return WeightSyncError(
        f"Weight sync could not {what} on {len(failures)} of {engines} engines:\n  "
        + "\n  ".join(f"{failure.url}: {failure.reason}" for failure in failures)
        + "\nThe weights of the engines are unknown now; see the engines' logs under the run directory.",
        merged([own, *(failure.data or ErrorData() for failure in failures)]),
    )


def late(url: str, deadline_s: float) -> Failure:
    """Return the failure of an engine that did not answer in time."""
    return Failure(url, f"no answer within {deadline_s:.0f} s (--weight-sync-timeout)", late=True)


def agree(error: Exception | None) -> None:
    """Collective over the trainer: raise ``WeightSyncError`` on every rank when any of them has an ``error``.

    What fails on one rank must end the push on all, in the same place: otherwise the others wait for it forever. Every
    rank gets the data of all of them, and so decides alike.
    """
    mine = None
    if error is not None:
        text = str(error) if isinstance(error, WeightSyncError) else f"{type(error).__name__}: {error}"
        mine = (text, data_of(error))
    failures = [found for found in gather_from_world(mine) if found is not None]
    if not failures:
        return
    data = merged(data for _, data in failures)
    if not all(part.get("peer_lost") for _, part in failures):  # not the consequence of another failure, but with one
        data.pop("peer_lost", None)
    if isinstance(error, WeightSyncError):
        error.data = data
        raise error
    raise WeightSyncError(failures[0][0], data) from error


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
                failures.append(Failure(client.url, f"no answer within its deadline: {error}", late=True))
            except Exception as error:  # noqa: BLE001 - collected, named and raised below
                failures.append(Failure(client.url, f"{type(error).__name__}: {error}", data=data_of(error)))
        if failures:
            raise failed(what, failures, len(self.clients))
        return results

    def call(self, what: str, call: Callable[[Any], T], deadline_s: float) -> list[T]:
        """``start`` and ``wait`` in one."""
        return self.wait(self.start(call), what, deadline_s)

    def close(self) -> None:
        """Stop taking calls; threads that still wait for an engine end with their own timeouts."""
        self._pool.shutdown(wait=False, cancel_futures=True)

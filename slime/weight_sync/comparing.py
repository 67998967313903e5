"""Weights as bytes in host memory, compared in threads while the next ones are gathered."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from slime.utils.cores import usable_cores
from slime.weights.delta.codec import Array
from slime.weights.delta.host_copy import MAX_THREADS

T = TypeVar("T")
Result = TypeVar("Result")


def host_bytes(tensor: torch.Tensor) -> Array:
    """Return the content of ``tensor``, uint8 [bytes]; the memory is that of the tensor where that is on the host."""
    content: Array = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return content


def in_threads(items: Iterable[T], work: Callable[[T], Result | None]) -> Iterator[Result]:
    """Yield ``work(item)`` in the order of the items, unless it is None; a few items per thread are held at a time."""
    threads = min(MAX_THREADS, usable_cores())
    running: deque[Future[Result | None]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for item in items:
            running.append(pool.submit(work, item))
            if len(running) > 2 * threads and (result := running.popleft().result()) is not None:
                yield result
        for future in running:
            if (result := future.result()) is not None:
                yield result

"""Megatron's ``torch_dist`` save strategy, writing from this process.

Megatron's own writer forks one process per file and starts a ``multiprocessing.Manager``, which imports the main
module again: seconds per save, unsafe with Ray's threads and CUDA, and a process left over when the trainer dies.
Here the same writer functions run in the calling thread. They spend their time in system calls without the GIL.
"""

from __future__ import annotations

import queue
from typing import Any

from slime.backends.megatron_utils import import_megatron
from slime.backends.megatron_utils.parallel import data_parallel


def in_process_strategy(*, parallel_over_dp: bool) -> Any:
    """Return a save strategy; with ``parallel_over_dp`` the DP x CP ranks share the writing of replicated tensors."""
    import_megatron()
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    # The queue through which the writer returns results; set before Megatron would start a Manager process for it.
    filesystem_async._results_queue = queue.Queue()

    class InProcessStrategy(TorchDistSaveShardedStrategy):
        def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> Any:
            request = super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret)
            if request.async_fn is None:
                return request
            transforms, _use_msc = request.async_fn.args
            return request._replace(async_fn=lambda *args: _write(filesystem_async, transforms, *args))

    strategy = InProcessStrategy("torch_dist", 1)
    ranks = data_parallel(with_context_parallel=True)
    if parallel_over_dp and ranks.size > 1:
        return FullyParallelSaveStrategyWrapper(strategy, ranks.group)
    return strategy


def _write(filesystem_async: Any, transforms: list[Any], rank: int, buckets: list[Any], results: queue.Queue) -> None:
    """Write ``buckets`` one by one and put {bucket number: results} into ``results``. Raises what writing raised."""
    written: dict[int, Any] = {}
    for number, bucket in enumerate(buckets):
        answer: queue.Queue = queue.Queue()
        ticket: queue.Queue = queue.Queue()
        ticket.put(number)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(
            transforms, number, bucket, answer, ticket, use_fsync=True
        )
        _, outcome = answer.get_nowait()
        if isinstance(outcome, Exception):
            raise outcome
        written[number] = outcome
    results.put(written)

"""Functions of slime <= 0.3.1 that are called in another way today. Nothing here is used by slime itself."""

from __future__ import annotations

import asyncio
import atexit
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from slime.arguments.args import Args
from slime.utils.moved import warn_moved

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

_TRACKING = "slime.observability.logging_utils"
INTERVAL_S = 3.0
DEADLINE_S = 600.0


def calculate_fwd_flops(seqlens: Sequence[int], args: Args) -> float:
    """Return the FLOPs of one forward pass over sequences of these lengths: ``slime.models.flops.forward_flops``."""
    return float(import_module("slime.models.flops").forward_flops(args, seqlens))


def compute_statistics(values: Sequence[float]) -> dict[str, float]:
    """Return ``mean, median, max, min`` of ``values``; empty for none."""
    return import_module("slime.ray.manager.rollout_metrics").statistics(values, "") if values else {}


def dict_add_prefix(d: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return ``d`` with ``prefix`` before every key."""
    return {f"{prefix}{key}": value for key, value in d.items()}


def ensure_dataset_list(config: object) -> list[dict[str, Any]]:
    """Return the ``datasets`` of an eval file, a list of mappings or a mapping by name, as a list with names.

    Raises TypeError for anything else.
    """
    if config is None:
        return []
    if isinstance(config, dict):
        return [{"name": name, **(entry or {})} for name, entry in config.items()]
    if isinstance(config, (list, tuple)):
        return [dict(entry) for entry in config]
    raise TypeError(f"eval datasets must be a list of mappings or a mapping by name, got {type(config).__name__}")


async def abort_server_until_idle(
    url: str, *, api_key: str | None = None, interval_s: float = INTERVAL_S, deadline_s: float = DEADLINE_S
) -> None:
    """Abort all requests of the engine at ``url`` every ``interval_s`` seconds until it holds none.

    Again and again, because requests that were on their way arrive after an abort. Raises TimeoutError after
    ``deadline_s`` seconds and EngineError when the engine does not answer.
    """
    client = import_module("slime.servers.engine_client").EngineClient(url, api_key=api_key)
    deadline = time.monotonic() + deadline_s
    while True:
        await asyncio.to_thread(client.abort_all)
        left = await asyncio.to_thread(client.num_requests)
        if left == 0:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"{url} still holds {left} requests after {deadline_s:g} s of aborting them")
        logger.info("%s holds %d requests: aborting again in %g s", url, left, interval_s)
        await asyncio.sleep(interval_s)


async def abort_servers_until_idle(
    urls: Iterable[str], *, api_key: str | None = None, interval_s: float = INTERVAL_S, deadline_s: float = DEADLINE_S
) -> None:
    """Do so on several engines at once."""
    await asyncio.gather(
        *(abort_server_until_idle(url, api_key=api_key, interval_s=interval_s, deadline_s=deadline_s) for url in urls)
    )


def compute_log_probs(logits: Tensor, tokens: Tensor, process_group: ProcessGroup | None) -> Any:
    """Return log-probs [T, 1] of ``tokens`` [T] under ``logits`` [T, V_local]."""
    path, name = "slime.utils.ppo_utils", "calculate_log_probs_and_entropy"
    warn_moved(f"{path}.compute_log_probs", f"{path}.{name}(logits, tokens, group)[0]")
    return import_module("slime.algorithms.log_probs").calculate_log_probs_and_entropy(logits, tokens, process_group)[0]


def init_wandb_primary(args: Args) -> str | None:
    """Open the trackers of the driver, until it exits; return the id of the W&B run, None without ``--use-wandb``."""
    warn_moved("slime.utils.wandb_utils.init_wandb_primary", f"{_TRACKING}.init_tracking(args)")
    tracking = import_module(_TRACKING)
    tracking.init_tracking(args, primary=True)
    atexit.register(tracking.finish_tracking)  # loops of the releases that had this function do not call it
    run_id: str | None = args.wandb_run_id
    return run_id


def init_wandb_secondary(args: Args, wandb_run_id: str | None = None, router_addr: str | None = None) -> None:
    """Let this process hand its metrics to the driver, which writes them; the other arguments are not needed."""
    del wandb_run_id, router_addr
    warn_moved("slime.utils.wandb_utils.init_wandb_secondary", f"{_TRACKING}.init_tracking(args, primary=False)")
    import_module(_TRACKING).init_tracking(args, primary=False)

"""Old path of the set-up of Weights & Biases, which is now one of the trackers that ``init_tracking`` opens."""

from __future__ import annotations

import atexit
from argparse import Namespace
from typing import Any

from slime.utils.moved import warn_moved

__all__ = ["init_wandb_primary", "init_wandb_secondary"]

_NOW = "slime.observability.logging_utils.init_tracking"


def init_wandb_primary(args: Namespace) -> str | None:
    """Open the trackers of the driver, until it exits; return the id of the W&B run, None without ``--use-wandb``."""
    from slime.observability.logging_utils import finish_tracking

    warn_moved(f"{__name__}.init_wandb_primary", f"{_NOW}(args)")
    _init_tracking(args, primary=True)
    atexit.register(finish_tracking)  # loops of the releases that had this function do not call it
    return args.wandb_run_id


def init_wandb_secondary(args: Namespace, wandb_run_id: str | None = None, router_addr: str | None = None) -> None:
    """Let this process hand its metrics to the driver, which writes them; the other arguments are not needed."""
    del wandb_run_id, router_addr
    warn_moved(f"{__name__}.init_wandb_secondary", f"{_NOW}(args, primary=False)")
    _init_tracking(args, primary=False)


def _init_tracking(args: Namespace, *, primary: bool) -> Any:
    from slime.observability.logging_utils import init_tracking

    return init_tracking(args, primary=primary)

"""Values that a run finds out after its command line was parsed: attributes of ``args`` that the product sets itself.

Hooks and drivers of users read them as ``args.x``, so they are kept there. :func:`record` is their only writer outside
of ``slime.arguments``.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any, TypedDict, Unpack


class RunState(TypedDict, total=False):
    """Every attribute that is set while a run starts, or later."""

    run_id: str
    run_dir: str
    wandb_run_id: str | None
    sglang_config: str | None
    """As an absolute path: the processes of the run have other working directories."""
    sglang_api_key: str
    sglang_admin_api_key: str
    num_rollout: int
    """Counted from ``--num-epoch`` and the data set."""
    start_rollout_id: int
    """That of the checkpoint, where none was given."""
    load: str
    generates_while_training: bool
    rollout_external_engine_infos: list[dict[str, Any]]
    rollout_num_engines: int
    rollout_num_gpus: int
    sglang_router_ip: str
    sglang_router_port: int
    sglang_model_routers: dict[str, tuple[str, int]]
    """Address of the router by model."""
    sglang_model_engines: dict[str, int]
    """Engines in service by model; it changes when engines join and leave."""
    rank: int
    """Of the trainer that ``args`` belongs to, with ``world_size``."""
    world_size: int


def record(args: Namespace, **values: Unpack[RunState]) -> None:
    """Set attributes of ``args``. mypy checks their names and types."""
    for name, value in values.items():
        setattr(args, name, value)

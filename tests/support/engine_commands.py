"""The commands that would start the engines of a run, without a cluster."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from slime.arguments.files.sglang_config import deployment
from slime.arguments.placement import EnginePlan, engines_of
from slime.backends.sglang_utils.server_args import EngineSpec, build_server_args


def engine_commands(args: Namespace, model_path: str = "model") -> Iterator[tuple[EnginePlan, int, list[str]]]:
    """Yield (engine, node of it, arguments of SGLang's server) for every node of every engine of ``args``."""
    overrides = _overrides(args, model_path)
    on_gpus = Namespace(**{**vars(args), "device_type": "cuda"})
    for plan in engines_of(args):
        for node_rank in range(plan.nodes):
            spec = EngineSpec(
                rank=plan.rank,
                host="127.0.0.1",
                port=30000,
                nccl_port=30001,
                num_gpus=plan.num_gpus,
                model_path=model_path,
                dist_init_addr="127.0.0.1:30002" if plan.nodes > 1 else None,
                nnodes=plan.nodes,
                node_rank=node_rank,
                worker_type=plan.worker_type,
                bootstrap_port=30003 if plan.worker_type == "prefill" else None,
                overrides=overrides[plan.rank] if overrides else None,
            )
            yield plan, node_rank, build_server_args(on_gpus, spec)[3:]


def _overrides(args: Namespace, model_path: str) -> list[dict[str, Any]]:
    """The settings of every engine of ``--sglang-config``, by rank."""
    models = deployment(args).models if args.sglang_config else []
    groups = [group for model in models for group in model.server_groups]
    return [{**group.overrides, "model_path": model_path} for group in groups for _ in range(group.num_engines)]

"""The commands that would start the engines of a run, without a cluster."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from slime.arguments.placement import EnginePlan, engines_of
from slime.backends.sglang_utils.server_args import EngineSpec, build_server_args


def engine_commands(args: Namespace, model_path: str = "model") -> Iterator[tuple[EnginePlan, int, list[str]]]:
    """Yield (engine, node of it, arguments of SGLang's server) for every node of every engine of ``args``."""
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
                update_weights=plan.update_weights,
                offload=plan.offload,
                overrides={**plan.overrides, "model_path": model_path},
            )
            yield plan, node_rank, build_server_args(on_gpus, spec)[3:]

"""Where training and inference run, and how long the pieces wait for each other."""

from __future__ import annotations

from slime.arguments.group import ArgumentGroup, flag


class Cluster(ArgumentGroup):
    """Nodes, slots and placement. A slot is a GPU; on a machine without GPUs it is one process."""

    title = "cluster and placement"

    actor_num_nodes: int = flag(1, "nodes used for training", ge=0)
    actor_num_gpus_per_node: int = flag(8, "slots (GPUs) used for training on each of those nodes", ge=0)
    rollout_num_gpus: int | None = flag(
        None,
        "inference slots in total; 0 starts routers only. Needed unless training and inference share slots "
        "(--colocate) or there is no inference (--debug-train-only)",
        ge=0,
    )
    rollout_num_gpus_per_engine: int = flag(
        1,
        "slots of one engine: its tensor-parallel size x --sglang-pp-size; more than --num-gpus-per-node spans nodes",
        ge=1,
    )
    num_gpus_per_node: int = flag(8, "slots a node has; engines are placed by it", ge=1)
    colocate: bool = flag(
        False,
        "train and generate on the same slots, taking turns; implies --offload-train and --offload-rollout "
        "(--no-offload-train, --no-offload-rollout: not)",
    )
    offload: bool = flag(False, "both --offload-train and --offload-rollout")
    offload_train: bool | None = flag(None, "offload the trainer while engines generate; default: only with --colocate")
    offload_rollout: bool | None = flag(None, "release engine memory while training; default: only with --colocate")
    distributed_backend: str = flag(
        "nccl", "torch.distributed backend; gloo is chosen by itself on machines without GPUs"
    )
    distributed_timeout_minutes: int = flag(
        10, "minutes a collective operation of the trainers may take before the run ends", gt=0
    )
    ray_address: str | None = flag(
        None, "Ray cluster to join; default: $RAY_ADDRESS, else a cluster of this process's own"
    )
    placement_timeout: float = flag(300.0, "seconds to wait for the slots to be placed before giving up", gt=0)
    engine_ready_timeout: float = flag(600.0, "seconds an engine or router may take until it answers", gt=0)
    drain_timeout: float = flag(
        60.0,
        "seconds that requests in flight have when an engine is removed, or `slime serve` is stopped; it gets no new "
        "ones meanwhile",
        ge=0,
    )
    http_proxy: str | None = flag(None, "accepted for old launch scripts")
    use_distributed_post: bool = flag(
        False, "send requests from a helper process on every node, each with ports and open files of its own"
    )

"""Flags for the placement of training and inference, timeouts, and engines that end, join and leave."""

from __future__ import annotations

from slime.arguments.group import ArgumentGroup, DottedPath, flag
from slime.arguments.traits import Contract, WithoutGpu


class Cluster(ArgumentGroup):
    """Nodes, slots and placement. A slot is a GPU; on a machine without GPUs it is one process."""

    title = "cluster and placement"
    read_by = "run"

    actor_num_nodes: int = flag(1, "nodes used for training", ge=0)
    actor_num_gpus_per_node: int = flag(8, "slots (GPUs) used for training on each of those nodes", ge=0)
    rollout_num_gpus: int | None = flag(
        None,
        "inference slots in total; 0 starts routers only. Needed unless training and inference share slots "
        "(--colocate) or there is no inference (--debug-train-only)",
        ge=0,
        resolved_by="placement",
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
        takes_turns=True,
    )
    offload: bool = flag(False, "both --offload-train and --offload-rollout")
    offload_train: bool | None = flag(
        None,
        "offload the trainer while engines generate; default: only with --colocate",
        takes_turns=True,
        resolved_by="placement",
    )
    offload_rollout: bool | None = flag(
        None,
        "release engine memory while training; default: only with --colocate",
        takes_turns=True,
        resolved_by="placement",
    )
    distributed_backend: str = flag(
        "nccl",
        "torch.distributed backend; gloo is chosen by itself on machines without GPUs",
        read_by="trainers",
        without_gpu=WithoutGpu("gloo", "--distributed-backend nccl"),
    )
    distributed_timeout_minutes: int = flag(
        10, "minutes a collective operation of the trainers may take before the run ends", gt=0, read_by="trainers"
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
    http_proxy: str | None = flag(
        None, "accepted for old launch scripts", inert="set the environment variables http_proxy and no_proxy instead"
    )
    use_distributed_post: bool = flag(
        False, "send requests from a helper process on every node, each with ports and open files of its own"
    )


class FaultTolerance(ArgumentGroup):
    """Health checks and restarts."""

    title = "fault tolerance"
    read_by = "run"

    use_fault_tolerance: bool = flag(
        False,
        "check the health of engines, and start those again that have ended or stopped answering; they serve from the "
        "next weight sync on",
    )
    rollout_health_check_interval: float = flag(
        30.0, "seconds between two health checks of the engines", gt=0, needs="--use-fault-tolerance"
    )
    rollout_health_check_timeout: float = flag(
        30.0, "seconds one health check may take", gt=0, needs="--use-fault-tolerance"
    )
    rollout_health_check_first_wait: float = flag(
        0.0,
        "seconds after the start of a rollout, where checks have paused, before the engines are checked",
        ge=0,
        needs="--use-fault-tolerance",
    )
    rollout_health_check_failures: int = flag(
        3,
        "so many health checks in a row must fail before an engine is ended and started again",
        ge=2,
        needs="--use-fault-tolerance",
    )


class ElasticEngines(ArgumentGroup):
    """Limits on the number of engines, and the function that decides it."""

    title = "elastic engines"
    read_by = "run"

    rollout_min_engines: int = flag(1, "so many engines of a model stay when engines are removed", ge=1)
    rollout_max_engines: int | None = flag(
        None,
        "so many engines may a model have when engines are added; default: as many as the Ray cluster has room for",
        ge=1,
    )
    custom_engine_scaling_path: DottedPath | None = flag(
        None,
        "dotted path of your own function that says how many engines each model is to have, within "
        "--rollout-min-engines and --rollout-max-engines",
        hook=Contract("fn(args, engines), which returns {model: number of engines}", 2, generates=True),
    )
    engine_scaling_interval: float = flag(
        30.0, "seconds between two calls of that function", gt=0, needs="--custom-engine-scaling-path"
    )


class ExternalEngines(ArgumentGroup):
    """Engines started elsewhere."""

    title = "external engines"
    read_by = "run"

    rollout_external_engine_addrs: list[str] | None = flag(
        None, "addresses (host:port or http://host:port) of engines started elsewhere", deploys=True
    )

"""Placing a run: slots from Ray, the rollout manager, the trainers."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from slime.arguments.args import Args
from slime.arguments.placement import EnginePlan, Layout, engines_of, engines_split_across_nodes, layout_of, spare_slots
from slime.arguments.rules.checkpoints import needs_reference
from slime.arguments.rules.roles import ACTOR, CRITIC, role_args
from slime.arguments.rules.weight_sync import check_engine_stages
from slime.backends.sglang_utils.external import apply_external_engine_info_to_args, discover_external_engines
from slime.observability import tracking
from slime.ray import cluster
from slime.ray.cluster import node_sort_key, own_gpu_index
from slime.ray.driver.critic import agree_on_resume_step, first_rollout
from slime.ray.driver.rollout_handle import ManagerAndEpoch, RolloutHandle, handle_of
from slime.ray.driver.train_group import RayTrainGroup
from slime.ray.manager.rollout_manager import RolloutManager
from slime.ray.remote import Peer, results_so_far, wait_all, wait_one
from slime.utils.declared import with_defaults
from slime.utils.moved import warn_moved
from slime.utils.run_state import record

if TYPE_CHECKING:
    from slime.ray.remote import RemoteActor

logger = logging.getLogger(__name__)

Slots: TypeAlias = "tuple[PlacementGroup | None, list[int], list[int]]"
"""A placement group, the bundle index of every slot in order, and the GPU of every slot on its node."""

TrainGroups: TypeAlias = "tuple[RayTrainGroup | None, RayTrainGroup | None]"
"""The groups of actor and critic: none of the actor without training, none of the critic but for PPO."""

HEARTBEAT_LOG_S = 30.0
MANAGER_THREADS = 16
MANAGER_START_DEADLINE_S = 600.0
LAST_RECORDS_S = 10.0
PROCESSES_PER_CORE = 2
"""More slots than that per core of a machine without GPUs are worth a warning."""


class PlacementError(RuntimeError):
    """The cluster did not give the run its slots in time."""


def create_placement_groups(args: Args) -> dict[str, Slots]:
    """Reserve the slots of the run; return those of ``actor``, ``critic`` and ``rollout``.

    Connects to Ray first unless that has been done. Slots are ordered by node address and GPU, so that consecutive
    ranks share nodes. Raises PlacementError, naming requested and available slots, after ``--placement-timeout``, and
    ArgumentError for engines of ``--rollout-external-engine-addrs`` that do not answer or that the run cannot use.
    """
    args = with_defaults(args)
    if args.rollout_external and not args.debug_train_only:
        apply_external_engine_info_to_args(args, discover_external_engines(args))
    layout = layout_of(args)
    cluster.connect(args, layout.slots + spare_slots(args))
    if layout.slots == 0:
        none: Slots = (None, [], [])
        return {"actor": none, "critic": none, "rollout": none}
    pg, order, gpu_ids = _reserve(args, layout)
    trainer = (pg, order, gpu_ids)
    rollout = (pg, order[layout.rollout_offset :], gpu_ids[layout.rollout_offset :])
    return {"actor": trainer, "critic": trainer, "rollout": rollout}


def create_rollout_manager(args: Args, pg: Slots, wandb_run_id: str | None = None) -> ManagerAndEpoch:
    """Start the rollout manager, which starts engines and router in the background.

    With ``--offload-rollout`` the engines have given their memory back when this returns, so that trainers find it.
    Returns the pair of its actor handle and the number of rollouts per epoch (None without ``--num-epoch``). Sets
    ``args.num_rollout`` from ``--num-epoch`` when it is not given. Raises ValueError when an epoch holds no rollout.
    """
    args = with_defaults(args)
    del wandb_run_id  # of drivers of slime 0.1: metrics go through the driver, which has the run
    here = cluster.current()
    if args.sglang_config is not None:  # the manager reads it too, perhaps in another working directory
        record(args, sglang_config=os.path.abspath(args.sglang_config))
    manager: Any = (
        ray.remote(RolloutManager)
        .options(
            max_concurrency=MANAGER_THREADS,
            **here.tensor_transport(args),
            **here.whole_cpu(),
            **here.name_manager(Path(args.run_dir)),
        )
        .remote(args)
    )
    peer = Peer("the rollout manager", Path(args.run_dir) / "logs" / "rollout_manager.log")
    if here.own:  # else it has the environment of the cluster
        wait_one(manager.take_secrets.remote(cluster.secrets_of_users()), peer, "its start", MANAGER_START_DEADLINE_S)
    setup = manager.setup.remote(pg, here.wiring_of_engines())
    wait_one(setup, peer, "its start", MANAGER_START_DEADLINE_S)
    per_epoch: int | None = wait_one(
        manager.get_num_rollout_per_epoch.remote(), peer, "counting the prompts", MANAGER_START_DEADLINE_S
    )
    if args.num_epoch is None and args.num_rollout is not None:
        per_epoch = None
    if args.num_rollout is None:
        if not per_epoch:
            raise ValueError(
                f"--num-epoch {args.num_epoch}: the prompts of one epoch do not fill one rollout of "
                f"--rollout-batch-size {args.rollout_batch_size}; lower it, or give --num-rollout"
            )
        record(args, num_rollout=per_epoch * args.num_epoch)
        logger.info("%d rollouts: %d epochs of %d", args.num_rollout, args.num_epoch, per_epoch)
        manager.set_num_rollout.remote(args.num_rollout)
    tracking.get_tracker().add_source(lambda: _last_records([manager]))
    if args.offload_rollout or args.check_weight_update_equal:
        RolloutHandle(args, manager).prepare_engines()
    return ManagerAndEpoch((manager, per_epoch))


def launch_training_models(args: Args, pgs: dict[str, Slots]) -> TrainGroups:
    """Start the trainers' processes, without waiting: they import their packages while the rest of the run starts."""
    if args.debug_rollout_only:
        return None, None
    nodes, gpus = args.actor_num_nodes, args.actor_num_gpus_per_node
    of_actor = role_args(args, ACTOR)
    critic: RayTrainGroup | None = None
    if args.use_critic and args.num_rollout != 0:
        of_critic = role_args(args, CRITIC)
        agree_on_resume_step(of_actor, of_critic)
        critic = RayTrainGroup(of_critic, nodes, gpus, pgs["critic"], role="critic")
        critic.launch()
    actor = RayTrainGroup(of_actor, nodes, gpus, pgs["actor"], with_ref=needs_reference(of_actor))
    actor.launch()
    return actor, critic


def create_training_models(
    args: Args,
    pgs: dict[str, Slots],
    rollout_manager: RemoteActor | ManagerAndEpoch,
    wandb_run_id: str | None = None,
    *,
    launched: TrainGroups | None = None,
) -> TrainGroups:
    """Start the trainers, load their weights, and return the actor's group (None without training) and the critic's.

    The critic's is None but with ``--advantage-estimator ppo``. With ``--offload-train``, which a critic implies, they
    are offloaded when this returns; ``async_train`` and ``save_model`` onload them while they run. Sets
    ``args.start_rollout_id`` (from the checkpoint that was loaded) and puts the data source where it was then.
    ``launched``: what ``launch_training_models`` has started already.
    """
    args = with_defaults(args)
    del wandb_run_id  # as in create_rollout_manager
    rollout_manager = handle_of(rollout_manager)
    actor, critic = launched or launch_training_models(args, pgs)
    start = 0
    state: list[str] = []
    if actor is not None and critic is not None:
        start = _create_actor_and_critic(args, actor, critic, rollout_manager)
        if args.continues_own_checkpoints and args.save is not None:
            state = [args.save]  # while only the critic is trained, --load has become where the actor's weights are
    elif actor is not None:
        start = actor.create(rollout_manager)
    for group in (actor, critic):
        if group is not None:
            tracking.get_tracker().add_source(partial(_last_records_of, group))
    if actor is not None and args.offload_train:
        actor.offload()
    of_roles = critic is not None or ACTOR in args.role_values
    if args.start_rollout_id is None or (of_roles and "start_rollout_id" not in args.explicit_flags):
        record(args, start_rollout_id=start)
    wait_one(
        rollout_manager.load.remote(args.start_rollout_id - 1, *state),
        Peer("the rollout manager"),
        f"loading the state of the prompts after rollout {args.start_rollout_id - 1}",
        MANAGER_START_DEADLINE_S,
    )
    return actor, critic


def _create_actor_and_critic(
    args: Args, actor: RayTrainGroup, critic: RayTrainGroup, rollout_manager: RemoteActor | ManagerAndEpoch
) -> int:
    """Create both; return the first rollout: the one after which both were saved, plus one. The critic is offloaded."""
    critic_start = critic.create(rollout_manager)
    critic.offload()
    actor.others = [critic.liveness()]
    start = first_rollout(args, actor.create(rollout_manager), critic_start)
    critic.others = [actor.liveness()]
    actor.connect(critic)
    return start


def _last_records_of(group: RayTrainGroup) -> list[tracking.Record]:
    return _last_records(group.actors)


def _last_records(actors: Sequence[Any]) -> list[tracking.Record]:
    """The metrics that ``actors`` hold; those of the ones that have ended, or do something else, are lost."""
    found = results_so_far([actor.drain_records.remote() for actor in actors], LAST_RECORDS_S)
    return [record for records in found for record in records]


def allocate_train_group(
    args: Args,
    num_nodes: int,
    num_gpus_per_node: int,
    pg: Slots,
    *,
    role: str = ACTOR,
    with_ref: bool | None = None,
    wandb_run_id: str | None = None,
) -> RayTrainGroup:
    """Return a group of ``role``, not started. ``with_ref`` None: the actor has a reference if its loss needs one.

    ``wandb_run_id`` as in ``create_rollout_manager``.
    """
    args = with_defaults(args)
    of_role = role_args(args, role)
    if with_ref is None:
        with_ref = role == ACTOR and needs_reference(of_role)
    return RayTrainGroup(
        of_role, num_nodes, num_gpus_per_node, pg, role=role, with_ref=with_ref, wandb_run_id=wandb_run_id
    )


def create_actor_group(args: Args, pg: Slots, wandb_run_id: str | None = None) -> RayTrainGroup:
    """Return the actor's group, not started; of drivers older than ``create_training_models``."""
    warn_moved(f"{__name__}.create_actor_group", f"{__name__}.create_training_models(args, pgs, rollout_manager)")
    return allocate_train_group(args, args.actor_num_nodes, args.actor_num_gpus_per_node, pg, wandb_run_id=wandb_run_id)


def create_rollout_group(args: Args, pg: Slots, wandb_run_id: str | None = None) -> ManagerAndEpoch:
    """Start the rollout manager; of drivers older than ``create_rollout_manager``, which call it through the result."""
    warn_moved(f"{__name__}.create_rollout_group", f"{__name__}.create_rollout_manager(args, pg)")
    return create_rollout_manager(args, pg, wandb_run_id)


def _reserve(args: Args, layout: Layout) -> Slots:
    here = cluster.current()
    totals = ray.cluster_resources()
    if here.own:  # it does not grow: waiting for more than it has would be waiting for the deadline
        short = {k: v * layout.slots for k, v in here.slot.items() if v * layout.slots > totals.get(k, 0) + 1e-6}
        if short:
            raise PlacementError(_what_is_missing(here, layout, f"more than this machine has ({', '.join(short)})"))
    if "GPU" in here.slot:
        check_engine_stages(args)
    cores = int(totals.get("CPU", 0))
    # Without GPUs nothing keeps a command line for eight of them from starting as many processes on a laptop.
    if "GPU" not in here.slot and cores and layout.slots > PROCESSES_PER_CORE * cores:
        logger.warning(
            "there is no GPU: %d slots (%d train, %d generate) are as many processes, which share %d CPU cores; lower "
            "--actor-num-gpus-per-node and --rollout-num-gpus, unless it may take long",
            layout.slots, layout.trainer_slots, layout.rollout_slots, cores,
        )  # fmt: skip
    pg = placement_group([dict(here.slot)] * layout.slots, strategy="PACK")
    started = time.monotonic()
    next_sign = HEARTBEAT_LOG_S
    while not pg.wait(timeout_seconds=1):
        waited = time.monotonic() - started
        if waited > args.placement_timeout:
            message = _what_is_missing(
                here, layout, f"not placed within --placement-timeout {args.placement_timeout:g} s"
            )
            remove_placement_group(pg)
            raise PlacementError(message)
        if waited > next_sign:
            next_sign += HEARTBEAT_LOG_S
            logger.info("%s", _what_is_missing(here, layout, f"waiting for {waited:.0f} s"))
    slots, nodes = _in_order(here, pg, layout)
    if "GPU" in here.slot:  # without GPUs, slots are processes, which share a machine in any number
        check_engines_fit_nodes(engines_of(args), nodes, layout.rollout_offset)
        check_gpus_follow_each_other(engines_of(args), slots[2], layout.rollout_offset)
    return slots


def check_engines_fit_nodes(engines: Sequence[EnginePlan], nodes: Sequence[str], rollout_offset: int) -> None:
    """Raise PlacementError when an engine process would need GPUs of two nodes; ``nodes``: address of every slot."""
    split = engines_split_across_nodes(engines, nodes, rollout_offset)
    if split:
        first = split[0].gpu_offset + rollout_offset
        found = " and ".join(dict.fromkeys(nodes[first : first + split[0].num_gpus]))
        raise PlacementError(
            f"engine {split[0].rank} would get its {split[0].num_gpus} slots on {found}, but those of an "
            f"engine process ({split[0].num_gpus_on_node}) must be on one node. Change --actor-num-gpus-per-node, "
            "--rollout-num-gpus-per-engine or --num-gpus-per-node so that nodes hold whole engines; "
            "`--dry-run` shows the plan."
        )


def check_gpus_follow_each_other(engines: Sequence[EnginePlan], gpus: Sequence[int], rollout_offset: int) -> None:
    """Raise PlacementError when an engine process would get GPUs with others between them; ``gpus``: of every slot.

    SGLang is given the first one only, and counts from there.
    """
    for engine in engines:
        for part in engine.parts():
            given = [gpus[rollout_offset + slot] for slot in part]
            if given != list(range(given[0], given[0] + len(given))):
                raise PlacementError(
                    f"engine {engine.rank} would get GPUs {', '.join(map(str, given))} of a node, but those of an "
                    "engine process must follow each other: others on the Ray cluster have those between. Wait for "
                    "them, run on nodes of your own, or lower --rollout-num-gpus-per-engine"
                )


def _what_is_missing(here: cluster.Cluster, layout: Layout, state: str) -> str:
    available = ray._private.state.available_resources_per_node()
    nodes = [
        f"  node {n['NodeManagerAddress']}: {cluster.describe_resources(n['Resources'])}"
        f" (free: {cluster.describe_resources(available.get(n['NodeID'], {}))})"
        for n in ray.nodes()
        if n["Alive"]
    ]
    each = ", ".join(f"{k} {v:g}" for k, v in here.slot.items())
    shared = layout.rollout_offset == 0 and layout.trainer_slots and layout.rollout_slots
    return (
        f"{layout.slots} slots of [{each}] are {state}.\n"
        f"Asked for: {layout.trainer_slots} for training (--actor-num-nodes x --actor-num-gpus-per-node), "
        f"{layout.rollout_slots} for inference (--rollout-num-gpus)"
        f"{', on the same slots' if shared else ''}.\nThe cluster has:\n" + "\n".join(nodes) + "\n"
        "Lower these numbers, use --colocate to share slots, or add machines."
    )


class _SlotProbe:
    """Runs on a slot and reports which GPU Ray gave it, by its index on the node."""

    def gpu(self) -> int:
        return own_gpu_index()


def _in_order(here: cluster.Cluster, pg: PlacementGroup, layout: Layout) -> tuple[Slots, list[str]]:
    """The slots by node and GPU, and the address of the node of each."""
    node_of = {int(i): node for i, node in placement_group_table(pg)["bundles_to_node_id"].items()}
    address_of = {n["NodeID"]: n["NodeManagerAddress"] for n in ray.nodes()}
    here.watch_nodes(list(node_of.values()))
    gpus = _probe_gpus(here, pg, layout.slots) if "GPU" in here.slot else list(range(layout.slots))
    order = sorted(range(layout.slots), key=lambda b: (node_sort_key(address_of[node_of[b]]), gpus[b]))
    if "GPU" not in here.slot:
        on_node: dict[str, int] = {}
        for bundle in order:  # without GPUs, slots of a node are simply numbered
            gpus[bundle] = on_node[node_of[bundle]] = on_node.get(node_of[bundle], -1) + 1
    logger.info("slots: %s", ", ".join(f"{address_of[node_of[b]]}/{gpus[b]}" for b in order))
    return (pg, order, [gpus[b] for b in order]), [address_of[node_of[b]] for b in order]


def _probe_gpus(here: cluster.Cluster, pg: PlacementGroup, slots: int) -> list[int]:
    probes: list[Any] = [
        ray.remote(_SlotProbe)
        .options(scheduling_strategy=cluster.on_slot(pg, b), runtime_env=here.environment(), **here.share_of_slot(1.0))
        .remote()
        for b in range(slots)
    ]
    refs = [p.gpu.remote() for p in probes]
    try:
        return wait_all(refs, [Peer(f"slot {b}") for b in range(slots)], "asking for its GPU", MANAGER_START_DEADLINE_S)
    finally:
        for probe in probes:
            ray.kill(probe)

"""The trainers of one role, one actor per rank, driven from the driver; their end and restart (``--release-train``)."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from slime.arguments.args import Args
from slime.arguments.rules.loop import generates_always
from slime.arguments.rules.roles import role_args
from slime.backends.megatron_utils.checkpoints.directory import iteration_dir, remove_outdated
from slime.observability import tracking
from slime.ray import cluster
from slime.ray.actors.train_actor import TrainRayActor
from slime.ray.driver.rollout_handle import ManagerAndEpoch, handle_of
from slime.ray.driver.weight_push import WeightPush
from slime.ray.manager.engines import canary
from slime.ray.remote import DAY_S, LivenessMonitor, Peer, wait_all, wait_one

if TYPE_CHECKING:
    from slime.ray.remote import RemoteActor

logger = logging.getLogger(__name__)

SHARE = 0.4
"""Part of a slot that a trainer rank takes: actor, critic and engine fit on one."""
START_DEADLINE_S = 3600.0
SAVE_DEADLINE_S = 3600.0
OFFLOAD_DEADLINE_S = 900.0
DRAIN_DEADLINE_S = 60.0
QUIT_DEADLINE_S = 30.0
ELSEWHERE_GRACE_S = 5.0
"""Grace for processes of other hosts, whose end cannot be observed from here."""


class RayTrainGroup:
    """``num_nodes * num_gpus_per_node`` ranks on the first slots of ``pg``; each takes ``num_gpus_per_actor`` of one.

    Blocking methods return when every rank has answered, and raise ``RemoteFailure`` as soon as one has failed or an
    engine has died. ``async_train`` returns references, for ``ray.get`` or for ``wait``.
    """

    def __init__(
        self,
        args: Args,
        num_nodes: int,
        num_gpus_per_node: int,
        pg: tuple[Any, list[int], list[int]],
        *,
        role: str = "actor",
        with_ref: bool = False,
        num_gpus_per_actor: float = SHARE,
        wandb_run_id: str | None = None,
    ) -> None:
        del wandb_run_id  # metrics go through the driver, which has the run
        self.args, self.role, self.with_ref = args, role, with_ref
        self.world_size = num_nodes * num_gpus_per_node
        self.num_nodes = num_nodes
        self._pg = pg
        self._share = num_gpus_per_actor
        self._actors: list[Any] = []
        self._rollout_manager: Any = None
        self._watch: list[Any] = []
        self._measured: dict[str, float] = {}
        self.others: list[LivenessMonitor] = []
        """Liveness of the trainers of other roles; the end of one of them ends every wait here."""
        self._critic: RayTrainGroup | None = None
        self._training: tuple[int, list[Any]] | None = None  # the last rollout that was started on, and its answers
        self._starting: list[Any] = []
        self._push = WeightPush(args, self)
        self._saved: int | None = None
        self._start: int | None = None
        self.canary: list[float] | None = None
        """Log-probs of ``canary.TOKENS`` with the weights that the run starts from; ``create`` asks for them."""
        self._next: int | None = None  # the rollout after the last one whose training was started here
        self._transient = TransientCheckpoints(args)

    # Life of the ranks

    def launch(self) -> None:
        """Start the rank processes without waiting for them; they import their packages."""
        here = cluster.current()
        pg, bundles, _ = self._pg
        if len(bundles) < self.world_size:
            raise ValueError(f"{self.role}: {self.world_size} ranks do not fit on {len(bundles)} slots")
        share_all_cores = self._has_cores_to_itself() and here.device_type == "cpu"
        self._actors = [
            ray.remote(TrainRayActor)
            .options(
                scheduling_strategy=cluster.on_slot(pg, bundles[rank]),
                **here.tensor_transport(self.args, self._environment()),
                **here.share_of_slot(self._share),
            )
            .remote(resume_args(self.args, self._saved), self.role, rank, self.world_size, share_all_cores)
            for rank in range(self.world_size)
        ]
        for actor in self._actors:
            actor.import_packages.remote()  # what fails here fails in setup again

    def create(self, rollout_manager: RemoteActor | ManagerAndEpoch | None = None) -> int:
        """Build and load the trainers (see ``launch``); return the first rollout id, on which all ranks must agree."""
        if not self._actors:
            self.launch()
        if rollout_manager is not None:
            self.set_rollout_manager(rollout_manager)
        results = self.call_ranks("setup", f"starting the {self.role}", START_DEADLINE_S, self._master(), self.with_ref)
        starts = {start for start, _ in results}
        if len(starts) != 1:
            raise RuntimeError(
                f"the ranks of the {self.role} loaded different checkpoints: their next rollouts are {sorted(starts)}. "
                "Is --load a directory that every node shares?"
            )
        if rollout_manager is not None:
            self._send_layout(results[0][1])
        start = int(starts.pop())
        if self._start is None:
            self._start = start
            if self.role == "actor" and not self.args.debug_train_only:
                found = self.call_ranks("canary", "log-probs of a fixed prompt", START_DEADLINE_S, canary.TOKENS)
                self.canary = next(log_probs for log_probs in found if log_probs is not None)
        return start

    @property
    def actors(self) -> list[Any]:
        """The handles of the ranks, none while they are released."""
        return list(self._actors)

    def set_rollout_manager(self, rollout_manager: RemoteActor | ManagerAndEpoch) -> None:
        """Take weights to the engines of this manager, and end every wait when one of them dies.

        After ``async_init`` this waits for its end.
        """
        self._rollout_manager = handle_of(rollout_manager)
        self._watch = [self._rollout_manager.wait_for_failure.remote()]
        if self._starting:
            what = f"starting the {self.role}"
            self._start = wait_all(self._starting, self._peers(), what, START_DEADLINE_S, self._watch)[0]
            self._starting = []
            self._send_layout(self.call_ranks("layout", what, START_DEADLINE_S)[0])

    def _send_layout(self, config: dict[str, int]) -> None:
        if self.role == "actor":
            self.call_manager("set_train_parallel_config", "sending the parallel layout to the manager", config)

    def _master(self) -> tuple[str, int]:
        loopback = len({n["NodeID"] for n in ray.nodes() if n["Alive"]}) == 1
        ref, what = self._actors[0].master.remote(loopback), f"starting the {self.role}"
        found: tuple[str, int] = wait_one(ref, self._peers()[0], what, START_DEADLINE_S)
        return found

    def liveness(self) -> LivenessMonitor:
        """Return a monitor that detects the end of a rank while no call to it is pending."""
        return LivenessMonitor(self._actors, self._peers())

    def release(self) -> None:
        """End the ranks, whose state is in their checkpoint; return when processes and device memory are gone.

        ``restart`` starts them again (``--release-train``).
        """
        if self._actors:
            self._complete()
            where = self.call_ranks("process_location", f"releasing the {self.role}", QUIT_DEADLINE_S)
            actors, self._actors = self._actors, []
            end_actors(actors, where)
            logger.info("the %s has been released", self.role)

    def restart(self, rollout_id: int) -> None:
        """Restart released ranks for training on ``rollout_id``; no-op when they are running."""
        if self._actors:
            return
        start = self.create()
        if self._saved is not None and start != rollout_id:
            raise RuntimeError(
                f"the {self.role} restarted from checkpoint {start - 1} of --save {self.args.save} to train on rollout "
                f"{rollout_id}: does another run write there?"
            )

    # Work

    def async_train(
        self, rollout_id: int, rollout_data_ref: Sequence[Any], external_data: Sequence[Any] | None = None
    ) -> list[Any]:
        """Start one training step on every rank; return one reference per rank.

        ``external_data`` is one reference per rank (a critic's values); left out, it is what the critic that this
        group is connected to makes of the same rollout.
        """
        if external_data is None and self._critic is not None:
            external_data = self._critic.answers(rollout_id)
        per_rank = external_data if external_data is not None else [None] * self.world_size
        self._next = rollout_id + 1
        refs = [
            actor.train.remote(rollout_id, rollout_data_ref, external)
            for actor, external in zip(self._actors, per_rank, strict=True)
        ]
        self._training = rollout_id, refs
        return refs

    def connect(self, critic: RayTrainGroup) -> None:
        """Take the values of ``critic`` where ``async_train`` is given none."""
        self._critic = critic

    def answers(self, rollout_id: int) -> list[Any] | None:
        """Return the references of the last ``async_train`` if that was on this rollout, else None."""
        return self._training[1] if self._training is not None and self._training[0] == rollout_id else None

    def wait(self, refs: Sequence[Any], what: str) -> list[Any]:
        """Wait for references of ``async_train``; metrics of the ranks are written afterwards."""
        results = wait_all(refs, self._peers(), what, DAY_S, self._watch, self.others)
        self._collect()
        return results

    def save_model(self, rollout_id: int, force_sync: bool = False, keep: bool = True) -> None:
        """Save a checkpoint of iteration ``rollout_id``.

        Without ``keep`` it is not exported to ``--save-hf``, and is removed once there is a later one.
        """
        what = f"saving the {self.role} after rollout {rollout_id}"
        self.call_ranks("save", what, SAVE_DEADLINE_S, rollout_id, force_sync, keep)
        self._collect()
        self._saved = rollout_id
        if force_sync:
            self._transient.saved(rollout_id, due=keep)

    def update_weights(self, synchronous_loop: bool | None = None) -> int | None:
        """Push the weights to the engines; return their new version, None when the run has no engines.

        ``synchronous_loop`` means that nothing is generated during the push; None derives it from the rollout function.

        Engines that died and were restarted get the weights too, and requests after that. A push that fails because an
        engine has exited or does not respond any more is retried without it.
        """
        if synchronous_loop is None:
            synchronous_loop = not generates_always(self.args)
        # Drivers of users wait for generation and training with ``ray.get``, and fetch no metrics.
        self._collect()
        if self._rollout_manager is not None:
            tracking.ingest(self.call_manager("drain_records", "collecting metrics"))
        if self.args.debug_train_only and self.args.keep_old_actor:
            self.call_ranks("weights_synced", "noting a weight sync", OFFLOAD_DEADLINE_S, synchronous_loop)
        if self._rollout_manager is None or self.args.debug_train_only or self.args.debug_rollout_only:
            return None
        return self._push.run(synchronous_loop, new_weights=bool(self._actors))

    def call_ranks(self, method: str, what: str, deadline_s: float, *args: object) -> list[Any]:
        """Call a method on every rank; return the results in the order of the ranks."""
        refs = [getattr(actor, method).remote(*args) for actor in self._actors]
        return wait_all(refs, self._peers(), what, deadline_s, self._watch, self.others)

    def call_manager(self, method: str, what: str, *args: object, deadline_s: float | None = None) -> Any:
        """Call a method of the rollout manager; the deadline is that of starting engines unless it is given."""
        ref = getattr(self._rollout_manager, method).remote(*args)
        deadline_s = 3 * self.args.engine_ready_timeout if deadline_s is None else deadline_s
        return wait_one(ref, Peer("the rollout manager"), what, deadline_s, self._watch, self.others)

    def step_of_weights(self) -> int | None:
        """Return the training step that made the weights; before the first training what the run starts with."""
        given = self.args.start_rollout_id
        return self._next if self._next is not None else self._start if given is None else given

    def offload(self) -> None:
        """Move the trainers' state off their devices; nothing happens when it is."""
        self.call_ranks("sleep", f"offloading the {self.role}", OFFLOAD_DEADLINE_S)

    def onload(self) -> None:
        """Undo ``offload``."""
        self.call_ranks("wake_up", f"onloading the {self.role}", OFFLOAD_DEADLINE_S)

    def clear_memory(self) -> None:
        """Give cached device memory back."""
        self.call_ranks("clear_memory", f"clearing memory of the {self.role}", OFFLOAD_DEADLINE_S)

    def finish_saving(self) -> None:
        """Complete a checkpoint that is being written (``--async-save``)."""
        self.call_ranks("finish_saving", f"completing the {self.role}'s checkpoint", SAVE_DEADLINE_S)

    def finish(self) -> None:
        """Complete checkpoints that are still being written, and collect the last metrics."""
        self._complete()
        self._push.files.clear()

    def _complete(self) -> None:
        self.call_ranks("finish", f"completing the {self.role}'s checkpoints", SAVE_DEADLINE_S)
        self._collect()

    # What training loops of slime 0.1 call: they wait with ``ray.get`` for lists, which are empty here when all is done

    def async_init(self, args: Args, role: str, with_ref: bool = False) -> list[Any]:
        """Start ranks that play ``role`` and load their weights; each answers with the first rollout id.

        With ``--offload-train`` they are offloaded afterwards, as after ``create_training_models``.
        """
        self.args = role_args(args, role)
        self.role, self.with_ref = role, with_ref
        self.launch()
        master = self._master()
        self._starting = [actor.init.remote(master, with_ref) for actor in self._actors]
        return list(self._starting)

    def async_init_weight_update_connections(self, rollout_manager: RemoteActor | ManagerAndEpoch) -> list[Any]:
        """``set_rollout_manager``; connections are made when weights are first pushed."""
        self.set_rollout_manager(rollout_manager)
        return []

    def async_update_weights(self) -> list[Any]:
        self.update_weights()
        return []

    def async_save_model(self, rollout_id: int) -> list[Any]:
        self.save_model(rollout_id)
        return []

    def async_offload(self) -> list[Any]:
        self.offload()
        return []

    def async_onload(self) -> list[Any]:
        self.onload()
        return []

    # Inside

    def _peers(self) -> list[Peer]:
        logs = Path(self.args.run_dir) / "logs"
        return [Peer(f"{self.role} rank {r}", logs / f"{self.role}_rank{r}.log") for r in range(self.world_size)]

    def _collect(self) -> None:
        refs = [actor.drain_records.remote() for actor in self._actors]
        for records in wait_all(refs, self._peers(), "collecting metrics", DRAIN_DEADLINE_S, self._watch):
            tracking.ingest(records)
            self._measured.update({record["name"]: record["value"] for record in records})

    def measured(self, name: str) -> float | None:
        """Return the last value of a metric that the ranks have logged, None before the first."""
        return self._measured.get(name)

    def _has_cores_to_itself(self) -> bool:
        """Return whether no engine generates while these ranks train, and no number of threads was given."""
        args = self.args
        takes_turns = args.colocate or args.offload_rollout or args.debug_train_only
        if not takes_turns and getattr(args, "generates_while_training", True):  # set by the built-in loops
            return False
        return "OMP_NUM_THREADS" not in {**os.environ, **(args.train_env_vars or {})}

    def _environment(self) -> dict[str, str]:
        env = {
            "NCCL_CUMEM_ENABLE": os.environ.get("NCCL_CUMEM_ENABLE", "0"),
            "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": os.environ.get("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1"),
        }
        if self.args.use_routing_replay:
            env["ENABLE_ROUTING_REPLAY"] = "1"
        sizes = [
            getattr(self.args, name, None) or 1 for name in ("tensor_model_parallel_size", "context_parallel_size")
        ]
        if self.args.device_type == "cuda" and max(sizes) > 1:
            # One hardware queue: kernels start in the order of the calls, a collective before the product it overlaps.
            env["CUDA_DEVICE_MAX_CONNECTIONS"] = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        return env | {key: str(value) for key, value in (self.args.train_env_vars or {}).items()}


def end_actors(actors: Sequence[Any], where: Sequence[tuple[str, int]]) -> None:
    """End actors and return when their processes, and with them their device memory, are released.

    ``where``: the node and the process of each.
    """
    ray.wait([actor.quit.remote() for actor in actors], num_returns=len(actors), timeout=QUIT_DEADLINE_S)
    for actor in actors:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(actor)
    here = ray.get_runtime_context().get_node_id()
    deadline = time.monotonic() + QUIT_DEADLINE_S
    for pid in [pid for node, pid in where if node == here]:
        while _is_alive(pid):
            if time.monotonic() > deadline:
                raise RuntimeError(f"trainer process {pid} is still there {QUIT_DEADLINE_S:.0f} s after it was ended")
            time.sleep(0.05)
    if any(node != here for node, _ in where):
        time.sleep(ELSEWHERE_GRACE_S)


def _is_alive(pid: int) -> bool:
    """Return True if process ``pid`` runs; a zombie does not: its memory is free already."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def resume_args(args: Args, saved: int | None) -> Args:
    """Return the arguments of restarted trainers: those of the start until the run has saved, then its checkpoint.

    ``--ckpt-step``, ``--finetune``, ``--no-load-optim`` and ``--no-load-rng`` are about the start of the run.
    """
    if saved is None:
        return args
    assert args.save is not None, "what has been saved is below --save"
    resumed = copy.copy(args)
    resumed.load, resumed.ckpt_step = args.save, saved
    resumed.finetune = resumed.no_load_optim = resumed.no_load_rng = False
    return resumed


class TransientCheckpoints:
    """Checkpoints beyond ``--save-interval``, which only serve the restart: each is removed once the next is complete.

    One after which ``--ref-update-interval`` refreshed the reference is kept: it is loaded again.
    """

    def __init__(self, args: Args) -> None:
        self.args = args
        self._transient: int | None = None

    def saved(self, rollout_id: int, *, due: bool) -> None:
        """Record that the checkpoint of ``rollout_id`` is complete."""
        before, self._transient = self._transient, None
        interval = self.args.ref_update_interval
        if not due and not (interval and (rollout_id + 1) % interval == 0):
            self._transient = rollout_id
        if self.args.save is not None and before is not None and before != rollout_id:
            try:
                shutil.rmtree(iteration_dir(self.args.save, before))
            except OSError as e:
                logger.warning("cannot remove checkpoint %d, which --save-interval does not ask for: %s", before, e)
        if self.args.save is not None and due and self.args.release_train:  # else the trainer does, when it is complete
            remove_outdated(self.args, Path(self.args.save), rollout_id)

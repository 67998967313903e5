"""One rank of the Megatron trainer, actor or critic: build, load, train on rollouts, save, offload."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slime.arguments.args import Args
from slime.arguments.rules.checkpoints import needs_teacher, trains_policy
from slime.backends.megatron_utils import import_megatron
from slime.backends.megatron_utils.checkpoints.digests import WAY_BACK_OF_HF, check_files, write_digests
from slime.backends.megatron_utils.checkpoints.directory import find_checkpoint, is_megatron_checkpoint
from slime.backends.megatron_utils.checkpoints.lora_tensors import base_of, described
from slime.backends.megatron_utils.checkpoints.pickles import plain_values_only
from slime.backends.megatron_utils.checkpoints.save_load import CheckpointSaver, TrainerState, load_checkpoint
from slime.backends.megatron_utils.lora.peft import load_adapter, target_names
from slime.backends.megatron_utils.model.value_head import VALUE_HEAD
from slime.backends.megatron_utils.state.offload import Offloader
from slime.backends.megatron_utils.state.optimizer import build_optimizer, build_scheduler, reset_optimizer_states
from slime.backends.megatron_utils.state.parallel import (
    context_parallel,
    data_parallel,
    is_last_stage,
    pipeline_parallel,
    tensor_parallel,
)
from slime.backends.megatron_utils.train.balancing import build_balancing
from slime.backends.megatron_utils.train.cp_utils import all_gather_with_cp
from slime.backends.megatron_utils.train.data import RolloutData, prepare_rollout_data, tower_flops
from slime.backends.megatron_utils.train.hooks import TrainerHooks, load_trainer_hooks
from slime.backends.megatron_utils.train.logprob_passes import (
    ACTOR,
    REFERENCE,
    LogProbPasses,
    forward_only,
    served_log_probs,
)
from slime.backends.megatron_utils.train.loss import compute_advantages_and_returns
from slime.backends.megatron_utils.train.response_logits import get_log_probs_and_entropy
from slime.backends.megatron_utils.train.routing_replay import RoutingReplay, build_routing_replay
from slime.backends.megatron_utils.train.train_metrics import (
    check_rollout,
    check_steps,
    log_memory,
    log_perf,
    log_rollout_metrics,
    log_train_metrics,
    save_train_dump,
    watch_memory,
)
from slime.backends.megatron_utils.train.train_step import StepContext, configure_schedules, train_rollout
from slime.backends.megatron_utils.train.values import add_external_columns, checkpoint_has_value_head, get_values
from slime.backends.megatron_utils.train.weight_backup import (
    OldActor,
    WeightBackup,
    load_teacher,
    refreshed_reference,
)
from slime.batching.columns import RolloutShard
from slime.batching.log_prob_requests import LogProbReply, LogProbShard
from slime.batching.ragged_tensor import RaggedTensor
from slime.observability.profiling import Profiling
from slime.observability.timer import get_timers, timer
from slime.utils.run_state import record

logger = logging.getLogger(__name__)


class MegatronTrainer:
    """A plain object, one per rank. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set by whoever creates it.

    In a run that does not train the policy, such as an evaluation (``--num-rollout 0``), the actor has weights alone:
    no gradients, no optimizer and no schedule. Every method is collective over the ranks. Call ``initialize`` first.
    This class plays the actor; what another role does differently is in a subclass (``CriticTrainer``).

    Attributes:
        args: the flat namespace.
        model: list of model chunks (more than one with virtual pipeline stages).
        parallel_config: sizes and this rank's position by dimension, as the batch schedule wants them.
        is_weight_source: whether this rank sends its pipeline stage's weights to the engines.
    """

    role = ACTOR
    metric_prefix = ""
    """Before the names of metrics: ``train/<prefix>loss``, ``perf/<prefix>train_time``."""

    args: Args
    model: list[torch.nn.Module]
    parallel_config: dict[str, int]
    is_weight_source: bool

    def __init__(self, args: Args, role: str = ACTOR, with_ref: bool = False) -> None:
        if role != self.role:
            raise ValueError(f"this trainer plays the role {self.role!r}, not {role!r}")
        self.args = args
        self._with_ref = with_ref
        self._waiting_since: float | None = None
        self._offloaded_bytes = 0

    def initialize(self) -> int:
        """Build process groups, model and what trains it, load weights and state; return the first rollout id."""
        from slime.backends.megatron_utils.initialize import initialize_megatron

        import_megatron()
        self.hooks: TrainerHooks = load_trainer_hooks(self.args)
        initialize_megatron(self.args)
        record(self.args, rank=torch.distributed.get_rank(), world_size=torch.distributed.get_world_size())
        if self.hooks.after_megatron_init is not None:
            self.hooks.after_megatron_init(self.args)
        self.parallel_config = self._describe_parallelism()
        self.is_weight_source = tensor_parallel().rank == 0 and data_parallel(with_context_parallel=True).rank == 0

        self.model = self._build_model()
        self.device = next(self.model[0].parameters()).device
        self.optimizer = build_optimizer(self.args, self.model) if self._trains else None
        self.scheduler = build_scheduler(self.args, self.optimizer) if self._trains else None
        replays = self.role == ACTOR and self._trains
        self._routing = build_routing_replay(self.args, self.model) if replays else RoutingReplay(self.args)
        self._context = StepContext(
            self.args,
            self.model,
            self.optimizer,
            self.scheduler,
            self.hooks,
            self.device,
            self._routing,
            build_balancing(self.args, self.model),
        )
        configure_schedules(self._context)
        adapters = described(self.args, target_names(self.model)) if self.args.lora_rank else None
        self._state = TrainerState(self.model, self.optimizer, self.scheduler, adapters)

        trained_only = adapters is not None and not needs_teacher(self.args)
        self._backup = WeightBackup(self.model, active=ACTOR, trained_only=trained_only)
        if self._with_ref and adapters is None:  # with adapters the reference is the model without them
            self._load_reference()
        if needs_teacher(self.args):
            load_teacher(self.args, self.model, self._backup)
        start_rollout_id = self._load()
        keeps_old = self.args.keep_old_actor and self.role == ACTOR and self._trains
        self._old_actor = OldActor(self._backup, self.args.update_weights_interval) if keeps_old else None
        self._passes = LogProbPasses(
            self.args, self.model, self._backup, self.hooks, with_ref=self._with_ref, routing=self._routing
        )
        self._saver = CheckpointSaver(self.args)
        # no flag: set where actor and engines share devices, and by the file of roles
        copies = not getattr(self.args, "disable_param_buffers_cpu_backup", True)
        self._offloader = Offloader(self.model, self.optimizer, copy_rebuildable=copies)
        self._memory = watch_memory(self.device)
        self._profiling = Profiling(self.args, rank=torch.distributed.get_rank(), role=self.role)
        self._waiting_since = time.monotonic()
        return start_rollout_id

    def canary(self, tokens: Sequence[int]) -> list[float] | None:
        """Return the log-probs of ``tokens[1:]`` on the last pipeline stage, None elsewhere; not while offloaded."""
        return canary_log_probs(self.args, self.model, tokens, self.device)

    def served_log_probs(self, shards: Sequence[LogProbShard]) -> tuple[int, list[LogProbReply]] | None:
        """Reply to requests of the log-prob server; see ``logprob_passes.served_log_probs``."""
        return served_log_probs(self.args, self.model, shards, self.hooks)

    def load_weights(self, path: str, step: int | None = None) -> None:
        """Replace the weights by those of ``path``, a Megatron or Hugging Face checkpoint of this architecture.

        ``step``: which one of a Megatron checkpoint; None is its latest.
        """
        if is_megatron_checkpoint(path):
            load_checkpoint(self.args, path, TrainerState(self.model), step=step, weights_only=True)
        else:
            self._load_hf(path)

    def _build_model(self) -> list[torch.nn.Module]:
        from slime.backends.megatron_utils.model.provider import get_model

        return get_model(self.args, wrap_with_ddp=self._trains)

    @property
    def _trains(self) -> bool:
        return trains_policy(self.args)

    def _describe_parallelism(self) -> dict[str, int]:
        dp, cp, tp, pp = data_parallel(), context_parallel(), tensor_parallel(), pipeline_parallel()
        vpp = self.args.virtual_pipeline_model_parallel_size or 1
        return {
            "dp_size": dp.size,
            "cp_size": cp.size,
            "tp_size": tp.size,
            "pp_size": pp.size,
            "vpp_size": vpp,
            "microbatch_group_size_per_vp_stage": self.args.microbatch_group_size_per_vp_stage or pp.size,
            "dp_rank": dp.rank,
            "cp_rank": cp.rank,
            "tp_rank": tp.rank,
            "pp_rank": pp.rank,
        }

    def _load_reference(self) -> None:
        source = self.args.ref_load or self.args.hf_checkpoint
        step = self.args.ref_ckpt_step
        if refreshed := refreshed_reference(self.args):
            source, step = refreshed
        self.load_weights(source, step)
        self._backup.save(REFERENCE)

    def _load(self) -> int:
        """Load ``--load`` when it is a Megatron checkpoint, else Hugging Face weights; return the first rollout id."""
        load = self.args.load
        if self.args.lora_rank:
            return self._load_base_and_adapters()
        if is_megatron_checkpoint(load):
            iteration = self._load_megatron(str(load), self.args.ckpt_step)
            return 0 if iteration is None else iteration + 1
        sources = (load, self.args.ref_load, self.args.hf_checkpoint)
        found = [path for path in sources if path and (Path(path) / "config.json").is_file()]
        if not found:
            raise FileNotFoundError(
                "no weights to start from: --load is no Megatron checkpoint, and none of --load, --ref-load, "
                f"--hf-checkpoint {sources} is a directory with a config.json"
            )
        self._load_hf(found[0])
        self._weights_loaded()
        return 0

    def _load_base_and_adapters(self) -> int:
        """Load the base, and on it the adapters of ``--load`` or ``--lora-adapter-path`` if there are any."""
        base, load = base_of(self.args), self.args.load
        if is_megatron_checkpoint(base):
            state = TrainerState(self.model, base_only=True)
            load_checkpoint(self.args, base, state, step=self.args.ref_ckpt_step, weights_only=True)
        else:
            self._load_hf(base)
        if load != base and is_megatron_checkpoint(load):
            iteration = self._load_megatron(str(load), self.args.ckpt_step)
            return 0 if iteration is None else iteration + 1
        if self.args.lora_adapter_path is not None:
            load_adapter(self.model, self.args, self.args.lora_adapter_path)
        self._weights_loaded()
        return 0

    def _weights_loaded(self) -> None:
        """Let the optimizer take over the weights that are in the model now."""
        if self.optimizer is not None:
            self.optimizer.reload_model_params()

    def _load_megatron(self, root: str, step: int | None) -> int | None:
        """Continue from a Megatron checkpoint; return its iteration, None when counting starts afresh."""
        return load_checkpoint(self.args, root, self._state, step=step)

    def _load_hf(self, path: str) -> None:
        from slime.backends.megatron_utils.weights import load_hf

        check_files(Path(path), WAY_BACK_OF_HF)
        load_hf(self.model, path, self.args)
        logger.info("loaded Hugging Face weights from %s", path)

    def train(
        self, rollout_id: int, shard: RolloutShard, external_data: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Train on this DP rank's ``shard`` of rollout ``rollout_id``; log and return the metrics.

        ``external_data`` are further columns for this rank's samples (a critic's values). Returns ``{"steps": [...],
        "rollout": {...}}``; loss and rollout metrics are there on the last pipeline stage.
        Raises ValueError naming the sample for data that cannot be right, ``NonFiniteError`` for NaN or infinity.
        """
        if self.optimizer is None:
            raise RuntimeError(
                "train() in a run that does not train the policy (--num-rollout 0, or no more than "
                "--num-critic-only-steps): the trainer has weights alone"
            )
        if self._offloader.offloaded:
            raise RuntimeError("train() on an offloaded trainer: onload() must come first")
        if shard.dp_rank != self.parallel_config["dp_rank"]:
            raise ValueError(
                f"rollout {rollout_id}: got the shard of data-parallel rank {shard.dp_rank}, this is rank "
                f"{self.parallel_config['dp_rank']}"
            )
        if self._waiting_since is not None:
            get_timers().add("train_wait", time.monotonic() - self._waiting_since)
            self._waiting_since = None
        self._profiling.begin(rollout_id)
        with timer("train"), self._routing.one_rollout():
            self._saver.poll()
            with timer("data_preprocess"):
                data = prepare_rollout_data(self.args, shard, self.device)
            rollout_metrics = self._before_steps(rollout_id, data, external_data or {})
            if self.args.reset_optimizer_states:
                reset_optimizer_states(self.optimizer)
            with timer(f"{self.role}_train"):
                steps = train_rollout(self._context, rollout_id, data)
            check_steps(self.args, rollout_id, steps, role=self.role)
            self._after_steps(rollout_id, data)
        log_train_metrics(self.args, rollout_id, steps, prefix=self.metric_prefix)
        of_towers = tower_flops(self.args, data) if is_last_stage() else 0.0
        log_perf(self.args, rollout_id, data["total_lengths"], prefix=self.metric_prefix, of_towers=of_towers)
        self._profiling.trained()
        copies = self._backup.host_bytes
        on_host, self._offloaded_bytes = self._offloaded_bytes, 0
        log_memory(
            self.args, rollout_id, self._memory, prefix=self.metric_prefix, weight_copies=copies, asleep_on_host=on_host
        )
        self._waiting_since = time.monotonic()
        return self._report(data, steps, rollout_metrics)

    def _before_steps(self, rollout_id: int, data: RolloutData, external_data: dict[str, Any]) -> dict[str, float]:
        """Complete ``data`` with what the loss needs; log and return the rollout's metrics."""
        add_external_columns(data, external_data, self.device)
        if self.args.compute_advantages_and_returns:
            self._passes.add_to(data)
            compute_advantages_and_returns(self.args, data)
        if self.hooks.postprocess_rollout_data is not None:
            self.hooks.postprocess_rollout_data(self.args, rollout_id, data)
        metrics = log_rollout_metrics(self.args, rollout_id, data)
        check_rollout(self.args, rollout_id, metrics)
        return metrics

    def _after_steps(self, rollout_id: int, data: RolloutData) -> None:
        save_train_dump(self.args, rollout_id, data)
        if self._old_actor is not None:
            self._old_actor.trained()
        interval = self.args.ref_update_interval
        if self._with_ref and interval and (rollout_id + 1) % interval == 0:
            with timer("ref_model_update"):
                self._backup.save(REFERENCE)
            logger.info("rollout %d: the actor's weights are the reference from now on", rollout_id)

    def _report(
        self, data: RolloutData, steps: list[dict[str, float]], rollout_metrics: dict[str, float]
    ) -> dict[str, Any]:
        del data  # for roles that return some of it
        return {"steps": steps, "rollout": rollout_metrics}

    def save(self, rollout_id: int, force_sync: bool = False, export: bool = True) -> None:
        """Save under ``--save`` as iteration ``rollout_id``; with ``export`` also to ``--save-hf`` when given.

        A save in the background (``--async-save``) is published by a later call, at the latest by one with
        ``force_sync``.
        """
        if self._offloader.offloaded:
            raise RuntimeError("save() on an offloaded trainer, without its optimizer state: onload() must come first")
        with timer("save_model"):
            self._saver.save(rollout_id, self._state, force_sync=force_sync)
            if export and (template := self.args.save_hf):
                self.export_hf(template.format(rollout_id=rollout_id))

    def finish_saving(self) -> None:
        """Wait for a background save and publish it."""
        self._saver.finish()

    def finish(self) -> None:
        """Complete what runs in the background: a save, and records of memory, which are written."""
        self.finish_saving()
        self._profiling.end()

    def export_hf(self, path: str | Path) -> None:
        """Write the weights as a Hugging Face checkpoint to ``path``; works while offloaded too."""
        from slime.backends.megatron_utils.weights import export_hf

        with self.weights_present():
            export_hf(self.model, self.args, path)
        write_digests(Path(path), pattern="*.safetensors")  # its configuration may be edited

    def offload(self) -> None:
        """Move parameters and optimizer state to host memory and free the device's (gradients are dropped)."""
        with timer("sleep"):
            self._backup.forget_active()  # one copy of the weights on the host is enough
            freed = self._offloader.offload()
            self.clear_memory()
        self._offloaded_bytes = kept = self._offloader.host_bytes
        logger.info("trainer offloaded: %.2f GiB freed, %.2f GiB of it copied to the host", freed / 2**30, kept / 2**30)

    def onload(self) -> None:
        """Undo ``offload``: everything is where it was, equal to the bit; gradient buffers are zero."""
        with timer("wake_up"):
            self._offloader.onload()

    @contextmanager
    def weights_present(self) -> Iterator[None]:
        """Within the body ``model`` holds its weights even if the trainer is offloaded (weight sync reads them so)."""
        with self._offloader.weights_present():
            yield

    def weights_synced(self, *, synchronous_loop: bool) -> None:
        """Note that the engines have the weights of now, or would have them in a run without engines."""
        if self._old_actor is not None:
            with self.weights_present():
                self._old_actor.synced(synchronous_loop=synchronous_loop)

    @property
    def offloaded(self) -> bool:
        """True if ``offload`` has been called, and ``onload`` has not since."""
        return self._offloader.offloaded

    def clear_memory(self) -> None:
        """Return cached blocks to the device, and with them what Megatron gathers activations into."""
        from megatron.core import parallel_state as mpu

        mpu.get_global_memory_buffer().buffer.clear()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def canary_log_probs(
    args: Args, model: Sequence[torch.nn.Module], tokens: Sequence[int], device: torch.device
) -> list[float] | None:
    """Return log p(token | those before it) of ``tokens[1:]``, a fixed prompt, without temperature and top-p.

    Engines are compared with them after the first push of weights.

    None except on the last pipeline stage. Collective: every data-parallel rank computes the same.
    """
    # Virtual pipeline stages take micro-batches in groups of this size.
    copies = args.microbatch_group_size_per_vp_stage or pipeline_parallel().size if len(model) > 1 else 1
    total, response = len(tokens), len(tokens) - 1
    data = {
        "tokens": RaggedTensor.of([torch.tensor(tokens, device=device)] * copies),
        "total_lengths": [total] * copies,
        "response_lengths": [response] * copies,
        "num_microbatches": [copies],
        "micro_batch_indices": [[position] for position in range(copies)],
    }
    collect = partial(get_log_probs_and_entropy, apply_temperature=False)
    columns = forward_only(args, model, data, collect, TrainerHooks())
    if not columns:
        return None
    log_probs: list[float] = all_gather_with_cp(columns["log_probs"][0], total, response).tolist()
    return log_probs


CRITIC = "critic"


class CriticTrainer(MegatronTrainer):
    """Estimates values with the weights of before, learns the returns, and hands the values to the actor.

    The model is the actor's with a value head for an output layer; it starts from the same weights, the head afresh.
    ``args`` are those of the role (``slime.arguments.rules.roles``), whose ``loss_type`` is ``value_loss``.
    """

    role = CRITIC
    metric_prefix = "critic-"

    def __init__(self, args: Args, role: str = CRITIC, with_ref: bool = False) -> None:
        if with_ref:
            raise ValueError("the critic has no reference model: its rewards are without the KL penalty")
        super().__init__(args, role=role)

    def _build_model(self) -> list[torch.nn.Module]:
        from slime.backends.megatron_utils.model.provider import get_model

        return get_model(self.args, with_value_head=True)

    @property
    def _trains(self) -> bool:
        return True  # there is none in a run that does not train it

    def _load_megatron(self, root: str, step: int | None) -> int | None:
        directory, _ = find_checkpoint(root, step)
        with plain_values_only(directory, trusted=self.args.unpickle_checkpoints):
            has_value_head = checkpoint_has_value_head(directory, self.args.hidden_size)
        if has_value_head:
            return super()._load_megatron(root, step)
        logger.warning("%s has no value head of this size: it starts afresh, the other weights are read", directory)
        state = TrainerState(self.model, adapters=self._state.adapters)
        load_checkpoint(self.args, root, state, step=step, weights_only=True, without=VALUE_HEAD)
        self._weights_loaded()
        return None

    def _load_hf(self, path: str) -> None:
        super()._load_hf(path)
        logger.info("the critic's value head starts with fresh weights")

    def _before_steps(self, rollout_id: int, data: RolloutData, external_data: dict[str, Any]) -> dict[str, float]:
        del external_data  # the critic is the first to see a rollout
        with timer("values"):
            data.update(forward_only(self.args, self.model, data, get_values, self.hooks))
        compute_advantages_and_returns(self.args, data)
        if rollout_id >= self.args.num_critic_only_steps:
            return {}
        return log_rollout_metrics(self.args, rollout_id, data)  # otherwise the actor's, which reports more

    def _after_steps(self, rollout_id: int, data: RolloutData) -> None:
        """Nothing: the dump of train data and the reference are the actor's."""

    def _report(
        self, data: RolloutData, steps: list[dict[str, float]], rollout_metrics: dict[str, float]
    ) -> dict[str, Any]:
        """Return {"values": one CPU tensor [n_local] per sample} on the last pipeline stage, {} on the others."""
        del steps, rollout_metrics  # they are logged
        if "values" not in data:
            return {}
        # A view of the whole column would be sent with all of it.
        return {"values": [value.to("cpu", copy=True) for value in data["values"]]}

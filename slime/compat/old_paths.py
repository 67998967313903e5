"""Modules of slime <= 0.3.1 that are no files here: what users import from them, and its home.

``import slime`` installs two finders. A module that moved (``ALIASES``) is the object at its new path, so that a patch
under either path takes effect. The others are found behind Python's own finders, so that a file of the same path wins;
they are empty until a name is asked for, and a function of theirs is patched at its home, where slime looks it up.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType

from slime.utils.moved import moved

_MEGATRON = "slime.backends.megatron_utils"
_WEIGHTS = f"{_MEGATRON}.weights"


def _at(home: str, names: str) -> dict[str, str]:
    return {name: f"{home}.{name}" for name in names.split()}


_METRICS = {"compute_rollout_step": "slime.observability.tracking.rollout_step"}
_STATISTICS = {
    **_METRICS,
    **_at("slime.compat.old_calls", "compute_statistics dict_add_prefix"),
    **_at("slime.compat.old_metrics", "compression_ratio compute_pass_rate"),
    "has_repetition": "slime.ray.manager.rollout_metrics.is_repetitive",
}
_TIMER = _at("slime.observability.timer", "Timer inverse_timer timer")
_UPDATERS = "slime.weight_sync.named_updaters"
_HF_NAMES = f"{_WEIGHTS}.hf_names"
_WANDB = _at("slime.compat.old_calls", "init_wandb_primary init_wandb_secondary")
_EXAMPLE = "GenerateState abort eval_rollout generate generate_and_rm generate_and_rm_group generate_rollout"
_TRACE = (
    "TRACE_CHILDREN_KEY TraceHandle bind_trace bind_trace_carrier build_sglang_meta_trace_attrs export_trace "
    "import_trace trace_event trace_function trace_next_attempt trace_span"
)
_CONVERTERS = (  # modules of hf_to_megatron and megatron_to_hf
    *("deepseekv3", "glm4", "glm4moe", "llama", "mimo", "minimax_m2", "qwen2", "qwen3_5", "qwen3_next", "qwen3moe"),
)

# Importable for good: name -> home.
PUBLIC: dict[str, dict[str, str]] = {
    "slime.utils.arguments": {
        **_at("slime.arguments.parse", "parse_args"),
        **_at("slime.arguments.command_line", "get_slime_extra_args_provider"),
        **_at("slime.arguments.rules.roles", "parse_megatron_role_args"),
        "slime_validate_args": "slime.arguments.rules.apply_rules",
    },
    "slime.utils.eval_config": {
        **_at("slime.arguments.files.eval_config", "EvalDatasetConfig build_eval_dataset_configs"),
        **_at("slime.compat.old_calls", "ensure_dataset_list"),
    },
    "slime.utils.ppo_utils": {
        **_at("slime.algorithms.advantages", "get_grpo_returns get_reinforce_plus_plus_baseline_advantages"),
        **_at("slime.algorithms.advantages", "get_reinforce_plus_plus_returns chunked_discounted_returns"),
        **_at("slime.algorithms.advantages", "chunked_gae get_advantages_and_returns_batch vanilla_gae"),
        **_at("slime.algorithms.kl", "compute_approx_kl"),
        **_at("slime.algorithms.log_probs", "calculate_log_probs_and_entropy"),
        **_at("slime.algorithms.losses", "compute_cispo_loss compute_gspo_kl compute_opsm_mask compute_policy_loss"),
        **_at("slime.compat.old_calls", "compute_log_probs"),
    },
    "slime.utils.wandb_utils": _WANDB,
    "slime.utils.dp_schedule": _at("slime.batching.schedule", "DpSchedule build_dp_schedule leftover_positions"),
    "slime.utils.seqlen_balancing": _at(
        "slime.batching.schedule",
        "expand_bins_by_splitting first_fit_pack get_reverse_idx get_seqlen_balanced_partitions karmarkar_karp",
    ),
    "slime.utils.flops_utils": {
        **_at("slime.compat.old_calls", "calculate_fwd_flops"),
        **_at("slime.models.flops", "FlopsModel flops_model forward_flops"),
    },
    "slime.utils.health_monitor": _at("slime.ray.manager.engines.health", "EngineHealth HealthLimits HealthMonitor"),
    "slime.utils.routing_replay": _at(f"{_MEGATRON}.train.routing_replay", "RoutingReplay build_routing_replay"),
    "slime.utils.tensor_backper": {"TensorBackuper": f"{_MEGATRON}.train.weight_backup.WeightBackup"},
    "slime.utils.accelerator.torch_accelerator": {
        "TorchAccelerator": "slime.utils.accelerator.CudaAccelerator",
        "CpuAccelerator": "slime.utils.accelerator.CpuAccelerator",
    },
    "slime.observability.rollout_data_utils": _at("slime.rollout.debug_data", "load_rollout save_rollout subsample"),
    "slime.observability.rollout_metrics": {
        **_at(
            "slime.compat.old_metrics",
            "compute_metrics_from_samples compute_perf_metrics_from_samples log_rollout_data",
        ),
        **_at(
            "slime.ray.manager.rollout_metrics",
            "eval_metrics pass_rates rollout_metrics sample_metrics zero_std_counts",
        ),
        **_METRICS,
    },
    "slime.observability.train_data_utils": {
        **_at(f"{_MEGATRON}.train.train_metrics", "save_train_dump"),
        **_at(f"{_MEGATRON}.train.data", "build_micro_batch micro_batch_iterators prepare_rollout_data"),
    },
    "slime.observability.train_metric_utils": _at(
        f"{_MEGATRON}.train.train_metrics", "log_perf log_rollout_metrics log_train_metrics rollout_means"
    ),
    "slime.observability.metric_utils": _STATISTICS,
    "slime.observability.profile_utils": {
        **_at("slime.observability.profiling", "Profiling TorchProfile profile_dir"),
        **_at("slime.observability.profiling", "MemrayRecorder TorchRecorder recorder_of"),
    },
    "slime.observability.tensorboard_utils": _at("slime.observability.logging_utils", "_TensorboardAdapter"),
    "slime.observability.wandb_utils": _WANDB,
    "slime.ray.actor_group": _at("slime.ray.driver.train_group", "RayTrainGroup"),
    "slime.ray.rollout": _at("slime.ray.manager.rollout_manager", "RolloutManager"),
    "slime.ray.ray_actor": _at("slime.ray.actors.worker", "RayActor"),
    "slime.ray.rollout_validation": _at("slime.ray.manager.engines.slots", "validate_server_group_gpu_indices"),
    "slime.ray.utils": {
        "Lock": "slime.ray.manager.engines.control.Lock",
        "NOSET_VISIBLE_DEVICES_ENV_VARS_LIST": "slime.ray.cluster.NOSET_VISIBLE_DEVICES",
    },
    "slime.backends.sglang_utils.server_control": {
        **_at("slime.servers.loads", "num_requests_from_load"),
        **_at("slime.compat.old_calls", "abort_server_until_idle abort_servers_until_idle"),
    },
    "slime.backends.sglang_utils.sglang_engine": {"SGLangEngine": "slime.ray.actors.engine_actor.EngineActor"},
    f"{_MEGATRON}.actor": {"MegatronTrainRayActor": "slime.ray.actors.train_actor.TrainRayActor"},
    f"{_MEGATRON}.ci_utils": _at(f"{_MEGATRON}.train.train_metrics", "check_rollout check_steps"),
    f"{_MEGATRON}.hf_checkpoint_saver": _at(f"{_WEIGHTS}.export", "export_hf"),
    f"{_MEGATRON}.hf_to_megatron": _at(f"{_WEIGHTS}.load", "load_hf"),
    f"{_MEGATRON}.misc_utils": _at(_HF_NAMES, "strip_param_name_prefix"),
    f"{_MEGATRON}.sglang": {
        "FlattenedTensorBucket": "sglang.srt.weight_sync.tensor_bucket.FlattenedTensorBucket",
        "MultiprocessingSerializer": "sglang.srt.utils.MultiprocessingSerializer",
        "monkey_patch_torch_reductions": "sglang.srt.utils.patch_torch.monkey_patch_torch_reductions",
    },
    f"{_MEGATRON}.megatron_to_hf": _at(_HF_NAMES, "convert_to_hf remove_padding"),
    **{f"{_MEGATRON}.megatron_to_hf.{name}": _at(_HF_NAMES, f"convert_{name}_to_hf") for name in _CONVERTERS},
    f"{_MEGATRON}.megatron_to_hf.processors.padding_remover": _at(_HF_NAMES, "remove_padding"),
    f"{_MEGATRON}.update_weight.update_weight_from_tensor": _at(_UPDATERS, "UpdateWeightFromTensor"),
    f"{_MEGATRON}.update_weight.update_weight_from_distributed": _at(_UPDATERS, "UpdateWeightFromDistributed"),
}

# Modules that moved: importable for good, one module object under both names, so that patches of either reach slime.
ALIASES: dict[str, str] = {
    **{
        f"{_MEGATRON}.{name}": f"{_MEGATRON}.train.{name}"
        for name in ("cp_utils", "data", "data_iterator", "loss", "routing_replay")
    },
    f"{_MEGATRON}.checkpoint": f"{_MEGATRON}.checkpoints.save_load",
    f"{_MEGATRON}.model_provider": f"{_MEGATRON}.model.provider",
    f"{_MEGATRON}.attention": f"{_MEGATRON}.model.attention",
    f"{_MEGATRON}.layer_specs": f"{_MEGATRON}.model.layer_specs",
    f"{_MEGATRON}.stateless_adam": f"{_MEGATRON}.state.stateless_adam",
    f"{_MEGATRON}.update_weight_utils": "slime.compat.update_weight_utils",
    f"{_MEGATRON}.server.megatron_server": "slime.ray.driver.log_prob_server",
    "slime.first_look": "slime.preflight.look",
    "slime.planner": "slime.preflight.plan",
    "slime.ray.placement_group": "slime.ray.driver.placement_group",
    "slime.ray.train_actor": "slime.ray.actors.train_actor",
    "slime.ray.train_group": "slime.ray.driver.train_group",
    "slime.utils.external_utils": "slime.launch",
    "slime.utils.http_utils": "slime.servers.http_utils",
    "slime.weight_sync.named_updaters": "slime.compat.named_updaters",
}

# Importable until the next major version, with a warning.
OLD: dict[str, dict[str, str]] = {
    "slime.arguments.plan": _at("slime.preflight.plan", "Plan plan"),
    "slime.arguments.plan.placement": _at("slime.arguments.placement", "EnginePlan Layout engines_of layout_of"),
    "slime.arguments.plan.text": _at("slime.preflight.plan.render", "plan_text summary_text"),
    "slime.observability.steps": _at("slime.observability.tracking", "rollout_step"),
    "slime.ray.rollout": _METRICS,
    "slime.rollout.agent_rollout": _at("slime_plugins.rollout_buffer.rollout_buffer_example", "generate_rollout"),
    "slime.rollout.sft_example": _at("slime.rollout.sft_rollout", "generate_rollout"),
    "slime.rollout.sglang_example": _at("slime.rollout.sglang_rollout", f"{_EXAMPLE} generate_rollout_async"),
    "slime.utils.logging_utils": _at(
        "slime.observability.logging_utils", "configure_logger finish_tracking init_tracking log"
    ),
    "slime.utils.metric_utils": _STATISTICS,
    "slime.utils.timer": _TIMER,
    "slime.utils.timer_utils": _TIMER,
    "slime.utils.trace_utils": _at("slime.observability.trace_utils", _TRACE),
}

_DELTA = "separate classes for changed weights: --update-weight-mode delta, slime.weights.delta"

# Modules of features that this version lacks, with everything below them.
LACKING: dict[str, str] = {
    "slime.utils.disk_delta": _DELTA,
    "slime.utils.reloadable_process_group": "process groups that are rebuilt when an offloaded trainer is onloaded",
    "slime.utils.rocm_checkpoint_writer": "a checkpoint writer for ROCm",
    "slime.utils.accelerator.musa": "MUSA devices (slime.utils.accelerator.register_accelerator adds a kind of device)",
    "slime.backends.sglang_utils.arguments": (
        "a parser of SGLang's flags of its own: slime.arguments.parse_args reads them from the installed package"
    ),
    **{
        f"{_MEGATRON}.hf_to_megatron.{name}": f"loaders of single families: {_WEIGHTS}.load_hf loads all"
        for name in _CONVERTERS
    },
    f"{_MEGATRON}.alignment": "trainer kernels that equal the engine's bit for bit",
    f"{_MEGATRON}.kernels": "kernels of its own for INT4: --quantization-aware-training needs none",
    **{
        f"{_MEGATRON}.megatron_to_hf.processors.quantizer_{name}": (
            "quantizers of single formats: slime.weights.quantization has one of all"
        )
        for name in ("fp8", "compressed_tensors")
    },
    f"{_MEGATRON}.update_weight.update_weight_from_disk_delta": _DELTA,
    "slime_plugins.models.flash_dot_product_attention": "attention by FlashAttention's own module",
    "slime_plugins.models.learnable_softmax_attention": "attention with a learnable softmax offset",
    "slime_plugins.models.glm5.ops": "kernels for sparse attention: slime.backends.megatron_utils.model needs none",
    "slime_plugins.models.qwen3_5_vl_utils": "parts of vision models: slime.backends.megatron_utils.model has them",
    "slime_plugins.models.qwen_gdn_backend": "a module for this choice: --qwen-gdn-backend makes it",
}


class OldPathFinder:
    """Finds the modules of the tables, which importers that look for files have not found."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of an old path. Raises ModuleNotFoundError that names the feature which is lacking."""
        feature = next((why for old, why in LACKING.items() if f"{fullname}.".startswith(f"{old}.")), None)
        if feature is not None:
            raise ModuleNotFoundError(f"there is no {fullname}: this version of slime lacks {feature}", name=fullname)
        is_package = any(old.startswith(f"{fullname}.") for old in (*ALIASES, *PUBLIC, *OLD, *LACKING))
        if fullname in PUBLIC or fullname in OLD or (is_package and fullname.startswith(f"{_MEGATRON}.")):
            return ModuleSpec(fullname, _OldModule(), is_package=is_package)  # type: ignore[arg-type]
        return None


def home_of(name: str) -> str:
    """Return a dotted name with the module that moved (``ALIASES``) under the path of its file."""
    old = max((old for old in ALIASES if f"{name}.".startswith(f"{old}.")), key=len, default=None)
    return name if old is None else ALIASES[old] + name.removeprefix(old)


class AliasFinder:
    """Finds modules that moved, and those below them. It comes before Python's own finders: these would load a file
    below a moved package a second time, under its old path."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module that moved; None for all others."""
        home = home_of(fullname) if fullname.startswith("slime.") else fullname
        if home == fullname:
            return None
        found = find_spec(home)
        origin = None if found is None else found.origin  # the file of a module that ``python -m`` runs
        return ModuleSpec(fullname, _MovedModule(home), origin=origin)  # type: ignore[arg-type]


class _MovedModule:
    def __init__(self, home: str) -> None:
        self.home = home

    def create_module(self, spec: ModuleSpec) -> None:
        """An ordinary module will do: it is replaced."""

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of the module, which ``python -m`` runs."""
        spec = find_spec(self.home)
        code: CodeType | None = spec.loader.get_code(self.home)  # type: ignore[union-attr]
        return code

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(self.home)


class _OldModule:
    def create_module(self, spec: ModuleSpec) -> None:
        """An ordinary module will do."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        public = PUBLIC.get(name, {})
        homes = {**public, **OLD.get(name, {})}
        module.__doc__ = "A path of slime <= 0.3.1; see slime.compat.old_paths."
        module.__all__ = list(homes)  # type: ignore[attr-defined]
        module.__getattr__ = moved(name, homes, for_good=public)  # type: ignore[method-assign]


def install() -> None:
    """Let old paths be imported; does nothing the second time."""
    if not any(isinstance(finder, OldPathFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, AliasFinder())
        sys.meta_path.append(OldPathFinder())

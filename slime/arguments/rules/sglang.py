"""Sizes of an engine, as SGLang counts them, and its keys."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slime.arguments import diagnostics
from slime.arguments.args import Args
from slime.arguments.errors import ArgumentError
from slime.arguments.passthrough.sglang import lacking_attributes
from slime.arguments.placement import Model, ServerGroup, args_of_group, models_of
from slime.models import hf_fields
from slime.models.facts import family_of, known_config

ALIASES = {
    "dp": "data_parallel_size",
    "pp": "pipeline_parallel_size",
    "ep": "expert_parallel_size",
    "moe_dp": "moe_data_parallel_size",
}


DRAFTED_BY_A_MODEL = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
OWN_DRAFTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "mtp_num_layers")
"""Keys of ``config.json`` that say how many MTP layers a checkpoint has, which SGLang drafts with."""

OWNED = frozenset(
    {
        "host", "port", "nccl_port", "nnodes", "node_rank", "dist_init_addr", "base_gpu_id", "api_key", "admin_api_key",
        "disaggregation_mode", "disaggregation_bootstrap_port",
    }
)  # fmt: skip
"""Fields of SGLang that slime decides for each engine; keys are those of all engines."""


def set_lacking(args: Args) -> None:
    """Flags that only the pinned SGLang has count as not given, so that they can be read without a guard."""
    sizes = {f"sglang_{name}" for short, long in ALIASES.items() for name in (f"{short}_size", long)}
    for name in lacking_attributes():
        if name not in sizes and not hasattr(args, name):
            setattr(args, name, None)


def take_keys(args: Args) -> None:
    """Keys that are not given as flags are those of the environment: every user of the host can read a command line."""
    args.sglang_api_key = args.sglang_api_key or os.environ.get("SLIME_SGLANG_API_KEY") or None
    args.sglang_admin_api_key = args.sglang_admin_api_key or os.environ.get("SLIME_SGLANG_ADMIN_API_KEY") or None
    for name in ("sglang_api_key", "sglang_admin_api_key"):
        key = getattr(args, name)
        if key is not None and not re.fullmatch(r"[!-,.-~][!-~]*", key):
            raise ArgumentError(
                f"--{name.replace('_', '-')} (SLIME_{name.upper()} in the environment): expected printable ASCII "
                "characters without a space, of which the first is no dash: a key is sent in a header, and SGLang "
                "reads it as a word of a command line"
            )


def derive_sizes(args: Args) -> None:
    """``sglang_tp_size`` from the slots of an engine; long and short names of the sizes agree."""
    if args.sglang_disaggregation_mode not in (None, "null"):
        raise ArgumentError(
            f"--sglang-disaggregation-mode {args.sglang_disaggregation_mode} would be that of every engine; give "
            "--prefill-num-servers, or groups of prefill and decode engines in --sglang-config"
        )
    _check_speculation(args)
    for short, long in ALIASES.items():
        names = (f"sglang_{short}_size", f"sglang_{long}")
        found = next((name for name in names if hasattr(args, name)), None)
        if found is None:
            diagnostics.warn(args, f"the installed SGLang has no --sglang-{short.replace('_', '-')}-size")
        for name in names:
            setattr(args, name, getattr(args, found) if found else 1)
    if args.sglang_config is not None and not args.debug_train_only:
        _check_groups(args)
    else:
        args.sglang_tp_size = args.sglang_tensor_parallel_size = _check_engine(args)
    address = args.sglang_router_ip
    if address is not None and ":" in address and not address.startswith("["):
        args.sglang_router_ip = f"[{address}]"
    if address is not None and args.sglang_router_port is None:
        raise ArgumentError(f"--sglang-router-ip {address} names a running router and needs --sglang-router-port")


def _check_speculation(args: Args) -> None:
    """Drafts need a model that makes them; without the algorithm the other flags about them have no effect."""
    if args.sglang_max_running_requests is not None and args.sglang_max_running_requests < 1:
        raise ArgumentError(
            f"--sglang-max-running-requests {args.sglang_max_running_requests}: expected at least 1; leave it out for "
            "as many as fit"
        )
    given = sorted(name for name in args.explicit_flags if name.startswith("sglang_speculative_"))
    algorithm = args.sglang_speculative_algorithm
    if algorithm is None:
        if given:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            diagnostics.warn(args, f"{flags} without --sglang-speculative-algorithm: nothing is drafted, no effect")
        return
    for name in ("sglang_speculative_accept_threshold_single", "sglang_speculative_accept_threshold_acc"):
        if getattr(args, name, 1.0) != 1.0:
            diagnostics.warn(
                args,
                f"--{name.replace('_', '-')} {getattr(args, name)}: drafts are accepted more often than the policy "
                "would sample them, so that log-probs are not those of the distribution that tokens come from; only "
                "1.0 samples from the policy",
            )
    if str(algorithm).upper() not in DRAFTED_BY_A_MODEL or args.sglang_speculative_draft_model_path:
        return
    known = known_config(args.hf_checkpoint) or {}
    path = Path(args.hf_checkpoint) / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else known
    own = hf_fields.text_part(config)
    if config and not any(own.get(key) for key in OWN_DRAFTS) and not (family_of(own) or {}).get("mtp_layers"):
        raise ArgumentError(
            f"--sglang-speculative-algorithm {algorithm} needs a model that drafts: give "
            "--sglang-speculative-draft-model-path (the checkpoint has no MTP layers of its own)"
        )


def _check_groups(args: Args) -> None:
    """Every group of the file has separate sizes; those of the flags hold where a group has none."""
    given, slots, stages = args.sglang_tp_size, args.rollout_num_gpus_per_engine, args.sglang_pp_size or 1
    args.sglang_tp_size = args.sglang_tensor_parallel_size = slots // stages if slots % stages == 0 else slots
    for model in models_of(args) or ():
        for group in model.server_groups:
            if group.worker_type == "placeholder":
                continue
            if taken := sorted(OWNED & set(group.overrides)):
                raise ArgumentError(
                    f"--sglang-config {args.sglang_config}: model {model.name}: the overrides have {', '.join(taken)}, "
                    "which slime chooses for each engine; leave it out"
                )
            with as_flags(args, model, group) as engine:
                tp = _check_engine(engine)
            if given not in (None, tp) and "tp_size" not in group.overrides:
                raise ArgumentError(
                    f"--sglang-tp-size {given} and --sglang-config {args.sglang_config}: engines of model {model.name} "
                    f"have num_gpus_per_engine / pp_size = {tp} tensor-parallel ranks; leave --sglang-tp-size out"
                )


@contextmanager
def as_flags(args: Args, model: Model, group: ServerGroup) -> Iterator[Args]:
    """Yield ``args`` with the values of ``group`` as flags; what is wrong with them is said of the group."""
    try:
        yield args_of_group(args, group)
    except ArgumentError as error:
        raise ArgumentError(
            f"--sglang-config {args.sglang_config}: model {model.name}, group of {group.worker_type} engines, "
            f"its values taken as flags: {error}"
        ) from error


def _check_engine(args: Args) -> int:
    """Return the tensor-parallel size of an engine with the sizes in ``args``. Raises ``ArgumentError``."""
    fraction = args.sglang_mem_fraction_static
    if fraction is not None and not 0 < fraction < 1:
        raise ArgumentError(
            f"--sglang-mem-fraction-static {fraction}: expected a part of the device memory, above 0 and below 1"
        )
    found = {name: getattr(args, f"sglang_{name}_size", None) for name in ("pp", "dp", "ep", "moe_dp")}
    sizes: dict[str, int] = {name: 1 if size is None else size for name, size in found.items()}
    for name, size in sizes.items():
        if size < 1:
            raise ArgumentError(f"--sglang-{name.replace('_', '-')}-size {size}: at least 1")
    tp = _check_sizes(args, sizes)
    _check_nodes(args, sizes["pp"])
    return tp


def _check_sizes(args: Args, sizes: dict[str, int]) -> int:
    slots, stages, dp = args.rollout_num_gpus_per_engine, sizes["pp"], sizes["dp"]
    if slots % stages != 0:
        raise ArgumentError(
            f"--rollout-num-gpus-per-engine {slots} cannot hold --sglang-pp-size {stages} equal pipeline stages"
        )
    given = args.sglang_tp_size
    if given not in (None, slots // stages):
        raise ArgumentError(
            f"--sglang-tp-size {given}: an engine has --rollout-num-gpus-per-engine {slots} / --sglang-pp-size "
            f"{stages} = {slots // stages} tensor-parallel ranks; change one of these, or leave --sglang-tp-size out"
        )
    tp = slots // stages
    of_engine = f"the tensor-parallel size {tp} of an engine (--rollout-num-gpus-per-engine / --sglang-pp-size)"
    if dp > 1 and not args.sglang_enable_dp_attention:
        raise ArgumentError(f"--sglang-dp-size {dp} needs --sglang-enable-dp-attention")
    if tp % dp != 0:
        raise ArgumentError(f"--sglang-dp-size {dp} must divide {of_engine}")
    if tp % sizes["ep"] != 0:
        raise ArgumentError(f"--sglang-ep-size {sizes['ep']} must divide {of_engine}")
    _check_experts(args, tp, sizes, of_engine)
    return tp


def _check_experts(args: Args, tp: int, sizes: dict[str, int], of_engine: str) -> None:
    """Data parallelism of the experts alone, as SGLang restricts it."""
    ep, moe_dp, dense_tp = sizes["ep"], sizes["moe_dp"], args.sglang_moe_dense_tp_size
    if moe_dp > 1 and sizes["pp"] > 1:
        raise ArgumentError(f"--sglang-moe-dp-size {moe_dp} excludes --sglang-pp-size {sizes['pp']}; leave one out")
    if tp % moe_dp != 0 or (moe_dp > 1 and ep > 1 and ep * moe_dp != tp):
        product = f" x --sglang-ep-size {ep} must be" if tp % moe_dp == 0 else " must divide"
        raise ArgumentError(f"--sglang-moe-dp-size {moe_dp}{product} {of_engine}")
    if dense_tp not in (None, 1, tp):
        raise ArgumentError(f"--sglang-moe-dense-tp-size {dense_tp} must be 1 or {of_engine}")


def _check_nodes(args: Args, stages: int) -> None:
    """An engine on several nodes has whole stages on each, or whole nodes for each stage."""
    nodes = args.rollout_num_gpus_per_engine // args.num_gpus_per_node
    if nodes > 1 and nodes % stages != 0 and stages % nodes != 0:
        raise ArgumentError(
            f"--sglang-pp-size {stages}: an engine of {nodes} nodes (--rollout-num-gpus-per-engine "
            f"{args.rollout_num_gpus_per_engine} / --num-gpus-per-node {args.num_gpus_per_node}) needs a multiple or a "
            "divisor of them"
        )

"""Megatron's flags: the fields of megatron-core's configuration classes, spelled the way Megatron-LM does.

Where Megatron-LM's training scripts can be imported, and megatron.core is not another one than theirs, their parser has
the last word about what it offers. Flags that no configuration field declares, or declares with another spelling, are
in tables. ``field`` names the field of the configuration class that gets the value; both attributes are set.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from slime.arguments.flag import Flag, Kind, first_of_each
from slime.arguments.passthrough import catalog
from slime.arguments.passthrough.sglang import flag_of_record
from slime.arguments.passthrough.source import (
    CHECKOUT,
    CORE_VARIABLE,
    MEGATRON,
    MEGATRON_LM,
    checkout,
    installed_directory,
    installed_version,
    unused_core,
)
from slime.arguments.passthrough.traits import with_traits
from slime.arguments.traits import Traits

# Group of the flags that only the installed Megatron-LM knows: nothing in slime reads them.
UNREAD = "Megatron: read by its training scripts only"
_PARALLEL_WORDS = ("parallel", "pipeline", "tp_comm", "p2p", "microbatch", "comm_type", "wgrad", "hierarchical")
MODEL, OPTIMIZER, PARALLEL, RUN = "Megatron: model", "Megatron: optimizer", "Megatron: parallelism", "Megatron: run"


def _value(option: str, default: object, kind: Kind, group: str, help: str, **more: Any) -> Flag:
    dest = more.pop("dest", option[2:].replace("-", "_"))
    return Flag(dest, (option,), default, kind, group=group, help=help, source="megatron", **more)


def _on(option: str, group: str, help: str, *, dest: str | None = None, field: str | None = None) -> Flag:
    dest = dest or option[2:].replace("-", "_")
    return Flag(dest, (option,), False, action="true", group=group, help=help, source="megatron", field=field)


def _off(option: str, dest: str, group: str, help: str, *, field: str | None = None) -> Flag:
    return Flag(dest, (option,), True, action="false", group=group, help=help, source="megatron", field=field)


_AWARE = " with --use-precision-aware-optimizer"
_MOMENTS = ("fp32", "bf16", "fp16", "fp8")

HAND_TABLE: tuple[Flag, ...] = (
    # model
    _value("--norm-epsilon", 1e-5, "float", MODEL, "epsilon of the norms", field="layernorm_epsilon"),
    _on("--apply-layernorm-1p", MODEL, "norm weights are stored around zero", field="layernorm_zero_centered_gamma"),
    _on("--swiglu", MODEL, "gated linear units with SiLU", field="gated_linear_unit"),
    _on("--squared-relu", MODEL, "squared ReLU"),
    _on("--init-method-xavier-uniform", MODEL, "Xavier uniform initialization"),
    _on("--group-query-attention", MODEL, "grouped-query attention with --num-query-groups groups"),
    _on("--untie-embeddings-and-output-weights", MODEL, "the output layer has separate weights"),
    _value("--vocab-size", None, "int", MODEL, "vocabulary of the checkpoint"),
    _value(
        "--make-vocab-size-divisible-by", 128, "int", MODEL, "the padded vocabulary is a multiple of this x TP size"
    ),
    _value("--max-position-embeddings", None, "int", MODEL, "longest sequence; default: --seq-length"),
    _value("--seq-length", None, "int", MODEL, "sequence length of fixed-length batches; default: 4096"),
    _value(
        "--position-embedding-type",
        "learned_absolute",
        "str",
        MODEL,
        "position embedding",
        choices=("learned_absolute", "rope", "mrope", "yarn", "relative", "none"),
    ),
    _on("--use-rotary-position-embeddings", MODEL, "same as --position-embedding-type rope"),
    _off("--no-position-embedding", "add_position_embedding", MODEL, "no position embedding"),
    _value("--rotary-base", 10000, "int", MODEL, "base of the rotary embedding"),
    _value("--rotary-percent", 1.0, "float", MODEL, "part of each head that is rotated"),
    _value("--rotary-seq-len-interpolation-factor", None, "int", MODEL, "linear interpolation of positions"),
    _on("--use-rope-scaling", MODEL, "Llama 3 scaling of the rotary embedding"),
    _value("--rope-scaling-factor", 8.0, "float", MODEL, "factor of --use-rope-scaling"),
    _value("--rope-type", None, "str", MODEL, "rotary embedding of latent attention", choices=("rope", "yarn")),
    _value("--q-lora-rank", None, "int", MODEL, "rank of the query projection of latent attention"),
    _value("--kv-lora-rank", 32, "int", MODEL, "rank of the key and value projection of latent attention"),
    _value("--rotary-scaling-factor", 1.0, "float", MODEL, "scaling of latent attention's rotary embedding"),
    _on("--fp8-param-gather", MODEL, "keep parameters in fp8 and gather them so", field="fp8_param"),
    _value("--num-experts", None, "int", MODEL, "experts per layer", field="num_moe_experts"),
    _value("--spec", None, "str", MODEL, "module and function of the layer specification", nargs="*"),
    _on("--attention-softmax-in-fp32", MODEL, "compute the attention softmax in fp32"),
    _on("--use-gated-attention", MODEL, "same as --attention-output-gate"),
    _on("--post-self-attn-layernorm", MODEL, "norm after attention"),
    _on("--post-mlp-layernorm", MODEL, "norm after the MLP"),
    _on("--enable-experimental", MODEL, "allow Megatron's experimental features"),
    # fusions
    _off("--no-masked-softmax-fusion", "masked_softmax_fusion", MODEL, "no fused softmax"),
    _off("--no-bias-gelu-fusion", "bias_gelu_fusion", MODEL, "no fused bias and GELU"),
    _off("--no-bias-swiglu-fusion", "bias_swiglu_fusion", MODEL, "no fused bias and SwiGLU"),
    _off("--no-bias-dropout-fusion", "bias_dropout_fusion", MODEL, "no fused bias and dropout"),
    _off("--no-rope-fusion", "apply_rope_fusion", MODEL, "no fused rotary embedding"),
    _off("--no-persist-layer-norm", "persist_layer_norm", MODEL, "no persistent layer-norm kernel"),
    _off("--no-gradient-accumulation-fusion", "gradient_accumulation_fusion", PARALLEL, "no fused accumulation"),
    _on("--recompute-activations", MODEL, "same as --recompute-granularity selective"),
    # parallelism
    _value(
        "--decoder-first-pipeline-num-layers",
        None,
        "int",
        PARALLEL,
        "layers of the first pipeline stage",
        field="num_layers_in_first_pipeline_stage",
    ),
    _value(
        "--decoder-last-pipeline-num-layers",
        None,
        "int",
        PARALLEL,
        "layers of the last pipeline stage",
        field="num_layers_in_last_pipeline_stage",
    ),
    _value("--num-layers-per-virtual-pipeline-stage", None, "int", PARALLEL, "layers per virtual pipeline stage"),
    _value("--num-virtual-stages-per-pipeline-rank", None, "int", PARALLEL, "virtual stages per pipeline rank"),
    _off("--no-overlap-p2p-communication", "overlap_p2p_comm", PARALLEL, "no overlap of pipeline communication"),
    _on(
        "--accumulate-allreduce-grads-in-fp32",
        PARALLEL,
        "accumulate and reduce gradients in fp32",
        field="grad_reduce_in_fp32",
    ),
    _on("--grad-reduce-in-bf16", PARALLEL, "reduce gradients in bf16"),
    _off(
        "--no-check-for-nan-in-loss-and-grad",
        "check_for_nan_in_loss_and_grad",
        PARALLEL,
        "let NaN pass",
        field="check_for_nan_in_grad",
    ),
    _off("--no-align-param-gather", "align_param_gather", PARALLEL, "do not align parameter gathers of stages"),
    _on("--use-nccl-ub", PARALLEL, "NCCL user buffers", field="nccl_ub"),
    _value("--ddp-bucket-size", None, "int", PARALLEL, "parameters per gradient bucket", field="bucket_size"),
    _on("--ddp-average-in-collective", PARALLEL, "average gradients in the collective", field="average_in_collective"),
    _on(
        "--ddp-pad-buckets-for-high-nccl-busbw",
        PARALLEL,
        "pad gradient buckets to sizes NCCL is fast with",
        field="pad_buckets_for_high_nccl_busbw",
    ),
    _on(
        "--ddp-reduce-scatter-with-fp32-accumulation",
        PARALLEL,
        "reduce-scatter gradients with fp32 accumulation",
        field="reduce_scatter_with_fp32_accumulation",
    ),
    _on("--use-tp-pp-dp-mapping", PARALLEL, "rank order tensor, pipeline, data instead of tensor, data, pipeline"),
    _value("--nccl-communicator-config-path", None, "str", PARALLEL, "YAML file of NCCL communicator settings"),
    _on("--data-parallel-random-init", PARALLEL, "a different seed on every data-parallel rank"),
    _on("--te-rng-tracker", PARALLEL, "TransformerEngine's random-state tracker", field="use_te_rng_tracker"),
    # optimizer
    _value("--min-lr", 0.0, "float", OPTIMIZER, "smallest learning rate"),
    _value(
        "--lr-decay-style",
        "linear",
        "str",
        OPTIMIZER,
        "shape of the learning rate",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    ),
    _value("--lr-decay-iters", None, "int", OPTIMIZER, "steps of the decay; default: the whole run"),
    _value("--lr-warmup-fraction", None, "float", OPTIMIZER, "part of the decay steps spent on warm-up"),
    _value("--lr-warmup-iters", 0, "int", OPTIMIZER, "steps of warm-up"),
    _value("--lr-warmup-init", 0.0, "float", OPTIMIZER, "learning rate warm-up begins with"),
    _value(
        "--lr-wsd-decay-style",
        "exponential",
        "str",
        OPTIMIZER,
        "annealing of WSD",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    ),
    _value("--lr-wsd-decay-iters", None, "int", OPTIMIZER, "steps of WSD's annealing"),
    _value("--start-weight-decay", None, "float", OPTIMIZER, "weight decay at the start; default: --weight-decay"),
    _value("--end-weight-decay", None, "float", OPTIMIZER, "weight decay at the end; default: --weight-decay"),
    _value(
        "--weight-decay-incr-style",
        "constant",
        "str",
        OPTIMIZER,
        "shape of the weight decay",
        choices=("constant", "linear", "cosine"),
    ),
    _on("--override-opt_param-scheduler", OPTIMIZER, "flags win over the scheduler state of the checkpoint"),
    _on("--use-checkpoint-opt_param-scheduler", OPTIMIZER, "the scheduler state of the checkpoint wins over flags"),
    _value("--optimizer-offload-fraction", 1.0, "float", OPTIMIZER, "part of the optimizer that is offloaded"),
    _value("--main-grads-dtype", "fp32", "str", OPTIMIZER, "type of gradients" + _AWARE, choices=("fp32", "bf16")),
    _value("--main-params-dtype", "fp32", "str", OPTIMIZER, "type of parameters" + _AWARE, choices=("fp32", "fp16")),
    _value("--exp-avg-dtype", "fp32", "str", OPTIMIZER, "type of Adam's first moments" + _AWARE, choices=_MOMENTS),
    _value("--exp-avg-sq-dtype", "fp32", "str", OPTIMIZER, "type of Adam's second moments" + _AWARE, choices=_MOMENTS),
    _off("--muon-no-split-qkv", "muon_split_qkv", OPTIMIZER, "Muon treats the QKV projection as one matrix"),
    # run
    _value("--ckpt-step", None, "int", RUN, "step of the checkpoint to load; default: the latest"),
    _value(
        "--ckpt-format",
        "torch_dist",
        "str",
        RUN,
        "format of the checkpoints that are saved",
        choices=("torch_dist", "torch", "torch_dcp", "zarr", "fsdp_dtensor"),
    ),
    _off("--no-ckpt-fully-parallel-save", "ckpt_fully_parallel_save", RUN, "one data-parallel rank writes"),
    _on("--no-load-optim", RUN, "leave the optimizer state of the checkpoint"),
    _on("--no-load-rng", RUN, "leave the random state of the checkpoint"),
    _on("--no-save-rng", RUN, "leave the random state out of checkpoints"),
    _on("--finetune", RUN, "take weights only and count from 0"),
)

_TRAINERS = "a function or object of the trainer"
_DTYPE = "it follows from --bf16, --fp16 or neither"

# Fields of which no flag is made -> why.
NOT_FLAGS: dict[str, str] = {
    "variable_seq_lengths": "always on: sequences are packed",
    "deallocate_pipeline_outputs": "always on",
    "bias_activation_fusion": "it follows from --no-bias-swiglu-fusion and --no-bias-gelu-fusion",
    "num_microbatches_with_partial_activation_checkpoints": "for schedules slime does not run",
    "enable_autocast": "the dtype of the parameters is that of the computation",
    "autocast_dtype": "the dtype of the parameters is that of the computation",
    "params_dtype": _DTYPE,
    "pipeline_dtype": _DTYPE,
    "timers": _TRAINERS,
    "finalize_model_grads_func": _TRAINERS,
    "grad_scale_func": _TRAINERS,
    "no_sync_func": _TRAINERS,
    "grad_sync_func": _TRAINERS,
    "param_sync_func": _TRAINERS,
    "_cpu_offloading_context": _TRAINERS,
    "quant_recipe": "an object made from --te-precision-config-file",
    "activation_func": "a function chosen by --swiglu and --squared-relu",
    "init_method": "a function chosen by --init-method-std and --init-method-xavier-uniform",
    "output_layer_init_method": "a function chosen by --init-method-std and --init-method-xavier-uniform",
    "embedding_init_method": "a function chosen by --embedding-init-method-std",
}

# Flags that Megatron-LM's own training scripts read and slime does not: launch scripts carry them. They are known, with
# Megatron-LM's defaults, so that they are answered by name: those that can have no effect here with a warning, those
# that would change the training with a refusal.
SCRIPT = "Megatron: training scripts"
SCRIPT_TABLE = Path(__file__).with_name("megatron_script_flags.tsv")
_FORMS: dict[str, dict[str, Any]] = {
    "switch on": {"action": "true"},
    "switch off": {"action": "false"},
    "int": {"kind": "int"},
    "float": {"kind": "float"},
    "text": {},
    "ints": {"kind": "int", "nargs": "*"},
    "texts": {"nargs": "*"},
}


@cache
def script_flags() -> tuple[Flag, ...]:
    """All of them, in the order of the table."""
    flags = []
    for line in SCRIPT_TABLE.read_text().splitlines():
        if not line.startswith("#"):
            option, dest, form, default, meaning, why = line.split("\t")
            _, is_choice, choices = form.partition("one of ")
            more: dict[str, Any] = {"choices": tuple(choices.split("|"))} if is_choice else _FORMS[form]
            more["traits"] = Traits(inert=why, not_yet=not why)
            flags.append(
                Flag(dest, (option,), json.loads(default), help=meaning, group=SCRIPT, source="megatron", **more)
            )
    return tuple(flags)


@cache
def megatron_flags() -> tuple[Flag, ...]:
    """The hand-written flags, which win, and one for every other configuration field."""
    taken = {name for flag in HAND_TABLE for name in (flag.dest, flag.field) if name}
    found = [r for r in catalog.records(catalog.MEGATRON) if r["kind"] is not None]
    fields = [_flag_of(r) for r in found if r["name"] not in taken and r["name"] not in NOT_FLAGS]
    ours = first_of_each([*HAND_TABLE, *fields, *script_flags()])
    offered, _ = _training_scripts()
    flags = ours if offered is None else _merged(ours, offered)
    return tuple(map(with_traits, flags))


def warnings() -> list[str]:
    """Return what the user should know about where megatron-core and the flags come from."""
    version, unused, used = installed_version(MEGATRON), unused_core(), checkout(MEGATRON)
    found = []
    if unused is not None:
        found.append(
            f"megatron.core is the installed {version}, not the copy in {unused.parents[1]} that comes first on the "
            f"PYTHONPATH; {CORE_VARIABLE}={CHECKOUT} uses that one, with which slime is not tested"
        )
    elif used is not None and installed_directory(MEGATRON) is not None:
        found.append(
            f"megatron.core is the copy in {used.parents[1]}, as {CORE_VARIABLE}={CHECKOUT} says, not the installed "
            f"{version}; slime is tested with {MEGATRON.pinned}"
        )
    _, reason = _training_scripts()
    if reason is not None:
        found.append(
            f"the flags of Megatron-LM in {checkout(MEGATRON_LM)} cannot be read, those of megatron-core's "
            f"configuration classes are used: {reason}"
        )
    return found


def aliases() -> dict[str, str]:
    """Attribute on the namespace -> name of the configuration field that means the same."""
    return {flag.dest: flag.field for flag in megatron_flags() if flag.field and flag.field != flag.dest}


def config_defaults() -> dict[str, Any]:
    """Fields that are set by slime and have no flag, with the value that holds until a rule changes it."""
    return {"variable_seq_lengths": True, "deallocate_pipeline_outputs": True}


@cache
def _training_scripts() -> tuple[list[dict[str, Any]] | None, str | None]:
    """The records of ``megatron.training``'s parser (None without it), and why it could not be read."""
    if checkout(catalog.MEGATRON_LM) is None:
        return None, None
    found = catalog.records_or_reason(catalog.MEGATRON_LM)
    return (None, found) if isinstance(found, str) else (found, None)


def _flag_of(record: dict[str, Any]) -> Flag:
    name, default = record["name"], record["default"]
    stem = name.replace("_", "-")
    common: dict[str, Any] = {
        "dest": name, "default": default, "help": record["help"], "group": _group_of(record), "source": "megatron",
    }  # fmt: skip
    if record["kind"] == "bool":
        if default is True:
            options = tuple(record["options"] or ("--no-" + stem, "--disable-" + stem))
            return Flag(options=options, action="false", **common)
        return Flag(options=tuple(record["options"] or ("--" + stem,)), action="true", **common)
    choices = record.get("choices")
    return Flag(
        options=tuple(record["options"] or ("--" + stem,)),
        kind=record["kind"],
        choices=tuple(choices) if choices else None,
        nargs=record.get("nargs"),
        collapse=record.get("collapse", False),
        **common,
    )


def _group_of(record: dict[str, Any]) -> str:
    if "OptimizerConfig" in record["classes"] and "TransformerConfig" not in record["classes"]:
        return OPTIMIZER
    parallel = record["classes"][0] == "DistributedDataParallelConfig"
    return PARALLEL if parallel or any(word in record["name"] for word in _PARALLEL_WORDS) else MODEL


def _merged(ours: Sequence[Flag], records: Sequence[dict[str, Any]]) -> list[Flag]:
    """The flags of the parser's ``records``, then those of ``ours`` that it does not have.

    Spelling, type, choices, default and help are the parser's. The attribute slime reads and the field of the
    configuration classes stay those of ``ours``; an attribute that is called otherwise by Megatron-LM is set too.
    """
    by_dest = {flag.dest: flag for flag in ours}
    by_option = {option: flag for flag in ours for option in flag.options}
    flags: list[Flag] = []
    used: set[str] = set()
    options: set[str] = set()
    for record in _one_per_attribute(records):
        known = by_dest.get(record["dest"]) or next(
            (by_option[option] for option in record["options"] if option in by_option), None
        )
        flag = _joined(record, None if known is None or known.dest in used else known)
        flags.append(flag)
        used.add(flag.dest)
        options.update(flag.options)
    return [*flags, *(flag for flag in ours if flag.dest not in used and not options.intersection(flag.options))]


def _joined(record: dict[str, Any], known: Flag | None) -> Flag:
    offered = replace(flag_of_record(record, prefix="", source="megatron", group=UNREAD), field=None)
    if known is None:
        return offered
    return replace(
        offered,
        dest=known.dest,
        field=known.field or (record["dest"] if record["dest"] != known.dest else None),
        group=known.group,
        help=offered.help or known.help,
        collapse=known.collapse and offered.nargs is not None,
        traits=known.traits,
    )


def _one_per_attribute(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records that set one attribute, joined: a pair of opposite switches, or several spellings of one flag."""
    found: dict[str, dict[str, Any]] = {}
    for record in records:
        earlier = found.get(record["dest"])
        if earlier is None:
            found[record["dest"]] = record
        elif {earlier["action"], record["action"]} == {"true", "false"}:
            on, off = (earlier, record) if earlier["action"] == "true" else (record, earlier)
            pair = [on["options"][0], off["options"][0]]
            found[record["dest"]] = {**earlier, "action": "tristate", "options": pair}
        else:
            found[record["dest"]] = {**earlier, "options": [*earlier["options"], *record["options"]]}
    return list(found.values())

"""The model flags must describe the checkpoint in ``--hf-checkpoint``, and engines must be able to serve it."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

from slime.arguments import diagnostics
from slime.arguments.args import Args
from slime.arguments.command_line import flags_by_option
from slime.arguments.errors import ArgumentError
from slime.arguments.placement import models_of
from slime.arguments.rules import mtp
from slime.arguments.rules.sglang import as_flags
from slime.models import hf_fields
from slime.models.bridges import bridged_families, bridged_settings
from slime.models.facts import family_of, known_model, trained_families
from slime.models.layer_attention import layer_attention, not_built
from slime.models.megatron_flags import Description, ModelFlag, describe, pattern, plain
from slime.models.shape import moe_layer_pattern

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
GENERATES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
"""Ends of the names of transformers' classes that have an output layer over the vocabulary."""

NEVER_TIED = ("qwen2_moe", "qwen3_moe", "qwen3_next", "glm4_moe", "mixtral")
"""Model types that SGLang 0.5 gives a separate ``lm_head`` for every value of ``tie_word_embeddings``."""


def read_config(hf_checkpoint: str, option: str = "--hf-checkpoint") -> dict[str, Any]:
    """``config.json`` of the checkpoint directory that ``option`` names; of a vision-language model its text part.

    Raises ``ArgumentError``.
    """
    path = Path(hf_checkpoint) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ArgumentError(
            f"{option} {hf_checkpoint}: there is no {path}; {_what_is_there(Path(hf_checkpoint))}give a local Hugging "
            "Face checkpoint directory (`hf download NAME --local-dir DIRECTORY` fetches one)"
        ) from error
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{option} {hf_checkpoint}: cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise ArgumentError(f"{option} {hf_checkpoint}: {path} holds no JSON object")
    return hf_fields.text_part(config)


def _what_is_there(path: Path) -> str:
    """Return what was given instead of a checkpoint directory."""
    if path.is_file():
        return "it is a file; "
    if (path / "adapter_config.json").exists():
        return "it is an adapter of PEFT, which --lora-adapter-path reads, and --hf-checkpoint is its base model; "
    for kind in ("*.gguf", "*.distcp", "latest_checkpointed_iteration.txt"):
        if file := next(path.glob(kind), None):
            return f"it has {file.name}, of another format; "
    return ""


def check_trained(args: Args) -> None:
    """Refuse a model that no trainer can load, however many flags describe it.

    The family must have a weight map, and the checkpoint be that of a model that generates text. ``--model-name`` and a
    model that the user builds are the user's word for it.
    """
    found = None if args.debug_rollout_only or args.model_name else config_of(args)
    if found is None or is_own_model(args, describe(found[0])):
        return
    config, name = found
    family = config.get("whole_model_type", config.get("model_type"))
    classes = [str(one) for one in config.get("architectures") or ()]
    problem = None
    if family_is_unknown({**config, "model_type": family}):
        problem = _unknown_family(config, family or "missing", classes)
    elif classes and not any(one.endswith(GENERATES) for one in classes):
        problem = (
            f"architectures {', '.join(classes)}, and slime trains models that generate text (whose class ends in "
            f"{', '.join(GENERATES)}): give the checkpoint of the language model"
        )
    elif missing := not_built(config):
        problem = f"{missing}, which slime does not build; it trains models of this family without it"
    if problem is None:
        return
    if not args.dry_run:
        raise ArgumentError(f"{name} has {problem}")
    args.not_available.append(f"{name} has {problem}")


def _unknown_family(config: dict[str, Any], family: str, classes: list[str]) -> str:
    reason = bridged_settings(config).get("problem")
    trained = sorted({*trained_families(), *bridged_families()} - ({family} if reason else set()))
    more = "" if bridged_families() else ", and further ones where the package mbridge is installed"
    return (
        f"model_type {family}, which slime does not train (architectures {', '.join(classes) or 'missing'})"
        f"{'; ' if reason else ''}{reason or ''}; it trains {', '.join(trained)}{more}. Give --model-name where its "
        "layers and tensor names are those of one of them; docs/en/developer_guide/add_a_model_family.md says how a "
        "family is added"
    )


def config_of(args: Args) -> tuple[dict[str, Any], str] | None:
    """Return the config of ``--hf-checkpoint``, and its name in messages; None when it does not exist.

    Where a dry run finds no checkpoint it is the published model of that name. Raises ``ArgumentError``.
    """
    if _is_there(args.hf_checkpoint):
        return read_config(args.hf_checkpoint), f"{args.hf_checkpoint}/config.json"
    known = known_model(args.hf_checkpoint)
    return None if known is None else (hf_fields.text_part(known.config), f"the published {known.repository}")


def family_is_unknown(config: dict[str, Any]) -> bool:
    """Return True if only the numbers of the model are known: neither activation nor norms nor kind of positions."""
    return config.get("megatron") is None and family_of(config) is None


def check_readable(args: Args) -> None:
    """The checkpoint must be there; a dry run says what it compares with instead."""
    if "hf_checkpoint" in diagnostics.missing_flags(args):
        return  # what is missing is said already
    if args.dry_run and not _is_there(args.hf_checkpoint):
        diagnostics.unavailable(args, _instead(args))
    elif not args.debug_rollout_only:
        read_config(args.hf_checkpoint)
    elif not (HUB_NAME.fullmatch(args.hf_checkpoint) or args.rollout_external_engine_addrs or _in_file_only(args)):
        read_config(args.hf_checkpoint)  # by its name engines alone may fetch a model


def _in_file_only(args: Args) -> bool:
    """Return True if checkpoints are those of ``--sglang-config``, which are looked at as the engines'."""
    return args.serve_only and args.sglang_config is not None


def check_consistency(args: Args) -> None:
    """Compare every field both sides have; all differences are reported at once."""
    if args.debug_rollout_only:
        return
    found = config_of(args)
    if found is None:
        return
    config, name = found
    description = describe(config)
    wrong = _differences(args, description, config.get("model_type")) + mtp.differences(args, config)
    if layer_attention(config) and args.window_size is not None and not is_own_model(args, description):
        wrong.append("--window-size is given, but the windows of its layers are read from there: leave it out")
    if wrong:
        raise ArgumentError(
            f"the model flags do not describe {name}: {'; '.join(wrong)}. Correct the flags or the checkpoint"
        )
    heads, tp = config.get("linear_num_key_heads") or 0, args.tensor_model_parallel_size
    if heads % tp:
        raise ArgumentError(
            f"--tensor-model-parallel-size {tp} ranks cannot divide the {heads} key heads of the gated delta nets of "
            f"{name} (linear_num_key_heads); use a size that does"
        )
    if not is_own_model(args, description):
        for note in description.notes:
            diagnostics.warn(args, f"{name}: {note}")


def differences(args: Args, config: dict[str, Any]) -> list[str]:
    """Return the differences between the model flags and ``config``, one phrase each."""
    return _differences(args, describe(config), config.get("model_type")) + mtp.differences(args, config)


def suggested_flags(hf_checkpoint: str) -> str:
    """The model flags a checkpoint needs, to copy, and the script that has them; empty without a readable config."""
    known = known_model(hf_checkpoint)
    if _is_there(hf_checkpoint):
        try:
            config = read_config(hf_checkpoint)
        except ArgumentError:
            return ""
    elif known is not None:
        config = known.config
    else:
        return ""
    description = describe(config)
    words = description.words()
    if known is not None and describe(known.config).words() == words:
        return f"{shlex.join(words)} (scripts/models/{known.script}.sh defines them as MODEL_ARGS)"
    return "; ".join([shlex.join(words), *description.notes])


def _is_there(hf_checkpoint: str) -> bool:
    return (Path(hf_checkpoint) / "config.json").exists()


def _instead(args: Args) -> str:
    start = f"no checkpoint at {args.hf_checkpoint}"
    if args.debug_rollout_only:
        return f"{start}: nothing of it was looked at"
    known = known_model(args.hf_checkpoint)
    if known is None:
        return f"{start}: the model flags were compared with nothing"
    return f"{start}: the model flags were compared with the published {known.repository}"


def is_own_model(args: Args, description: Description) -> bool:
    """Return True if the user builds the model: then only the values of the config are compared, not its family's."""
    return bool(args.custom_model_provider_path) or (args.spec is not None and args.spec not in description.specs)


def _differences(args: Args, description: Description, family: str | None) -> list[str]:
    flags = flags_by_option()
    own = is_own_model(args, description)
    found = []
    if description.specs and args.spec is None and not own:
        found.append(f"--spec is absent but for {family} it must be {' '.join(description.specs[0])}")
    for wanted in description.flags:
        flag = flags.get(wanted.option)
        if flag is None or not wanted.checked or (own and not wanted.key):
            continue
        if wanted.option == "--num-query-groups" and not args.group_query_attention:
            continue  # Megatron does not read it; the missing switch is what is reported
        if wanted.option == "--rotary-base" and _same_positions(args, wanted.value):
            continue
        seen = _seen(args, wanted.option, flag.dest)
        if flag.action in ("true", "false"):
            seen = seen == (flag.action == "true")
        if seen != wanted.value and not (wanted.option == "--vocab-size" and seen is None):
            found.append(_difference(wanted, seen, family))
    return found


def _same_positions(args: Args, theta: float) -> bool:
    """Return True if the base of the rotary embedding makes no difference: it is not used, or the same in fp32."""
    rotates = args.multi_latent_attention or args.position_embedding_type == "rope"
    return not rotates or math.isclose(float(args.rotary_base), float(theta), rel_tol=2**-24)


def _seen(args: Args, option: str, dest: str) -> Any:
    """The value of ``option`` in the form in which a config says it."""
    if option == "--moe-layer-freq" and isinstance(args.moe_layer_freq, int):
        return moe_layer_pattern(args.moe_layer_freq, args.num_layers)
    value, flag = getattr(args, dest), flags_by_option().get(option)
    return flag.traits.left_out if value is None and flag is not None else value


def _difference(wanted: ModelFlag, seen: object, family: str | None) -> str:
    if not wanted.key:
        return f"{wanted.option} is {_shown(seen)} but for {family} it must be {_shown(wanted.value)}"
    expected = wanted.stated or ("null" if wanted.value is None else _shown(wanted.value))
    is_word = seen is None or isinstance(seen, bool)
    return f"{wanted.option} {'is ' * is_word}{_shown(seen)} but {wanted.key} is {expected}"


def _shown(value: object) -> str:
    if value is None or value is False:
        return "absent"
    if value is True:
        return "given"
    return pattern(value) if isinstance(value, list) else plain(value)


def check_served_model(args: Args) -> None:
    """Compare engines with the configuration of the checkpoint that they serve."""
    if args.debug_train_only or args.rollout_external or not args.rollout_num_gpus:
        return
    if args.sglang_config is None:
        _check_engines_of(args, asked_by_rollouts=True)
        return
    for number, model in enumerate(models_of(args) or ()):
        path = str(model.model_path)
        if path != args.hf_checkpoint and not _is_there(path):
            diagnostics.unavailable(
                args,
                f"--sglang-config {args.sglang_config}: model {model.name}: there is no {path}/config.json; give a "
                "local Hugging Face checkpoint directory",
            )
        for group in model.server_groups:
            if group.worker_type != "placeholder":
                with as_flags(args, model, group) as engine:
                    _check_engines_of(engine, asked_by_rollouts=number == 0)


def _check_engines_of(args: Args, *, asked_by_rollouts: bool) -> None:
    try:
        config = read_config(args.hf_checkpoint)
    except ArgumentError:  # reported where the checkpoint itself is checked
        known = known_model(args.hf_checkpoint)
        if known is None:
            return
        config = hf_fields.text_part(known.config)
    _check_heads(args, config)
    if config.get("tie_word_embeddings") and config.get("model_type") in NEVER_TIED:
        raise ArgumentError(
            f"{args.hf_checkpoint} ties its output layer to the embedding (tie_word_embeddings), and SGLang's class "
            f"for {config['model_type']} does not: an engine would answer with an output layer that was never loaded. "
            "Give a checkpoint with an lm_head of its own"
        )
    if asked_by_rollouts:
        _warn_of_long_sequences(args, config)


def _check_heads(args: Args, config: dict[str, Any]) -> None:
    """SGLang divides heads among the ranks of an attention group, and repeats key and value heads if they are fewer."""
    ranks = args.rollout_num_gpus_per_engine // (args.sglang_pp_size or 1)
    if args.sglang_enable_dp_attention:
        ranks //= args.sglang_dp_size
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    where = (
        f"the {ranks} tensor-parallel ranks of an engine (--rollout-num-gpus-per-engine "
        f"{args.rollout_num_gpus_per_engine}); use another size of engine"
    )
    if isinstance(heads, int) and heads % ranks != 0:
        raise ArgumentError(f"the {heads} attention heads of {args.hf_checkpoint} cannot be divided among {where}")
    if isinstance(groups, int) and groups > 0 and groups % ranks != 0 and ranks % groups != 0:
        raise ArgumentError(
            f"the {groups} key and value heads of {args.hf_checkpoint} are neither a multiple nor a divisor of {where}"
        )


def _warn_of_long_sequences(args: Args, config: dict[str, Any]) -> None:
    longest = config.get("max_position_embeddings")
    scaling = config.get("rope_scaling") or {}
    if not isinstance(longest, int) or "factor" in scaling or args.sglang_context_length:
        return
    evaluations = args.eval_datasets if args.eval_interval is not None else ()
    for option, length in (
        ("--rollout-max-context-len", args.rollout_max_context_len),
        ("--rollout-max-response-len", args.rollout_max_response_len),
        ("--eval-max-context-len", args.eval_max_context_len if evaluations else None),
        *((f"max_response_len of the evaluation data set {one.name}:", one.max_response_len) for one in evaluations),
    ):
        if length is not None and length > longest:
            diagnostics.warn(
                args,
                f"{option} {length} is more than the {longest} positions of {args.hf_checkpoint}, where engines end a "
                "sequence (max_position_embeddings); give --sglang-context-length if the model can do more",
            )

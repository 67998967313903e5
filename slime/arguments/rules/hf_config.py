"""The model flags must describe the checkpoint in ``--hf-checkpoint``."""

from __future__ import annotations

import json
import shlex
from argparse import Namespace
from functools import cache
from pathlib import Path
from typing import Any

from slime.arguments import unchecked
from slime.arguments.errors import ArgumentError
from slime.arguments.flag import Flag
from slime.arguments.models import hf_fields
from slime.arguments.models.known import known_model
from slime.arguments.models.megatron_flags import Description, describe
from slime.arguments.models.model_flag import ModelFlag, pattern, plain
from slime.arguments.rules import prediction

# What an option that is left out stands for, where Megatron's default is None.
_LEFT_OUT: dict[str, Any] = {
    "--moe-router-topk-scaling-factor": 1,
    "--moe-router-num-groups": 1,
    "--moe-router-group-topk": 1,
    "--moe-shared-expert-intermediate-size": 0,
}


def read_config(hf_checkpoint: str, option: str = "--hf-checkpoint") -> dict[str, Any]:
    """``config.json`` of the checkpoint directory that ``option`` names; of a vision-language model its text part.

    Raises ``ArgumentError``.
    """
    path = Path(hf_checkpoint) / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ArgumentError(
            f"{option} {hf_checkpoint}: there is no {path}; give a local Hugging Face checkpoint directory "
            "(`hf download NAME --local-dir DIRECTORY` fetches one)"
        ) from error
    except (OSError, json.JSONDecodeError) as error:
        raise ArgumentError(f"{option} {hf_checkpoint}: cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise ArgumentError(f"{option} {hf_checkpoint}: {path} holds no JSON object")
    return hf_fields.text_part(config)


def check_readable(args: Namespace) -> None:
    """The checkpoint must be there; a dry run says what it compares with instead."""
    if args.dry_run and not _is_there(args.hf_checkpoint):
        unchecked.missing(args, _instead(args))
    elif not args.debug_rollout_only:
        read_config(args.hf_checkpoint)


def check_consistency(args: Namespace) -> None:
    """Compare every field both sides have; all differences are reported at once.

    Where a dry run finds no checkpoint, the other side is the published model of that name.
    """
    if args.debug_rollout_only:
        return
    if _is_there(args.hf_checkpoint):
        config, name = read_config(args.hf_checkpoint), f"{args.hf_checkpoint}/config.json"
    else:
        known = known_model(args.hf_checkpoint)
        if known is None:
            return
        config, name = known.config, f"the published {known.repository}"
    description = describe(config)
    wrong = _differences(args, description, config.get("model_type")) + prediction.differences(args, config)
    if wrong:
        raise ArgumentError(
            f"the model flags do not describe {name}: {'; '.join(wrong)}. Correct the flags or the checkpoint"
        )
    if not _is_own_model(args, description):
        for note in description.notes:
            unchecked.warn(args, f"{name}: {note}")


def differences(args: Namespace, config: dict[str, Any]) -> list[str]:
    """What the model flags say otherwise than ``config``, one phrase each."""
    return _differences(args, describe(config), config.get("model_type")) + prediction.differences(args, config)


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


def _instead(args: Namespace) -> str:
    start = f"no checkpoint at {args.hf_checkpoint}"
    if args.debug_rollout_only:
        return f"{start}: nothing of it was looked at"
    known = known_model(args.hf_checkpoint)
    if known is None:
        return f"{start}: the model flags were compared with nothing"
    return f"{start}: the model flags were compared with the published {known.repository}"


def _is_own_model(args: Namespace, description: Description) -> bool:
    """Whether the user builds the model: then only what the config says is compared, not what its family implies."""
    return bool(args.custom_model_provider_path) or (args.spec is not None and args.spec not in description.specs)


def _differences(args: Namespace, description: Description, family: str | None) -> list[str]:
    flags = _flags_by_option()
    own = _is_own_model(args, description)
    found = []
    if description.specs and args.spec is None and not own:
        found.append(f"--spec is absent but for {family} it must be {' '.join(description.specs[0])}")
    for wanted in description.flags:
        flag = flags.get(wanted.option)
        if flag is None or not wanted.checked or (own and not wanted.key):
            continue
        if wanted.option == "--num-query-groups" and not args.group_query_attention:
            continue  # Megatron does not read it; the missing switch is what is reported
        seen = _seen(args, wanted.option, flag.dest)
        if flag.action in ("true", "false"):
            seen = seen == (flag.action == "true")
        if seen != wanted.value and not (wanted.option == "--vocab-size" and seen is None):
            found.append(_difference(wanted, seen, family))
    return found


@cache
def _flags_by_option() -> dict[str, Flag]:
    from slime.arguments.command_line import all_flags

    return {option: flag for flag in all_flags() for option in flag.options}


def _seen(args: Namespace, option: str, dest: str) -> Any:
    """The value of ``option`` in the form in which a config says it."""
    if option == "--moe-layer-freq" and isinstance(args.moe_layer_freq, int):
        every = args.moe_layer_freq
        return [int(every > 0 and i % every == 0) for i in range(args.num_layers)]
    value = getattr(args, dest)
    return _LEFT_OUT.get(option) if value is None else value


def _difference(wanted: ModelFlag, seen: Any, family: str | None) -> str:
    if not wanted.key:
        return f"{wanted.option} is {_shown(seen)} but for {family} it must be {_shown(wanted.value)}"
    expected = wanted.stated or ("null" if wanted.value is None else _shown(wanted.value))
    is_word = seen is None or isinstance(seen, bool)
    return f"{wanted.option} {'is ' * is_word}{_shown(seen)} but {wanted.key} is {expected}"


def _shown(value: Any) -> str:
    if value is None or value is False:
        return "absent"
    if value is True:
        return "given"
    return pattern(value) if isinstance(value, list) else plain(value)

"""The arguments of actor and critic: the command line's, with what is given for the role.

That is ``--megatron-config-path``, and for the critic ``--critic-overrides`` too.
"""

from __future__ import annotations

from argparse import Namespace
from functools import cache
from typing import Any

from slime.arguments.command_line import all_flags
from slime.arguments.files.role_config import overrides_of, parse_megatron_role_args
from slime.arguments.passthrough import megatron
from slime.arguments.rules import model_defaults
from slime.arguments.rules.checkpoints import is_hf_checkpoint, is_megatron_checkpoint
from slime.arguments.rules.hf_config import read_config
from slime.arguments.rules.megatron import derive_model

ACTOR, CRITIC = "actor", "critic"
CRITIC_DIRECTORY = "critic"
"""Where in the actor's ``--save`` and ``--load`` the critic's checkpoints are, unless the file says otherwise."""

_WEIGHTS_ALONE = ("no_load_optim", "no_load_rng", "finetune")
_FOLLOWING = ("ffn_hidden_size", "kv_channels", "padded_vocab_size")  # from other sizes, unless they are said
# What belongs to a policy: a critic has no log-probs, no experts' choices to repeat and nothing to export.
_WITHOUT_POLICY: dict[str, Any] = {
    "loss_type": "value_loss",
    "normalize_advantages": False,  # it learns returns, which are never whitened
    "use_kl_loss": False,
    "use_rollout_logprobs": False,
    "keep_old_actor": False,
    "use_routing_replay": False,
    "use_rollout_routing_replay": False,
    "enable_mtp_training": False,
    "mtp_num_layers": None,
    "save_hf": None,
}


def actor_args(args: Namespace) -> Namespace:
    """Return what the actor's ranks get: ``args`` itself when the file says nothing of the actor."""
    overrides = overrides_of(args, ACTOR)
    if not overrides:
        return args
    role = _role(args, ACTOR)
    if "load" in overrides:
        _start_from(role, args, overrides, str(overrides["load"]), else_weights_of=args.load)
    return role


def critic_args(args: Namespace) -> Namespace:
    """Return what the critic's ranks get.

    Its checkpoints are in ``critic`` below the actor's unless the file gives it a ``load`` or ``save`` (a run that goes
    on from what it saves reads the ``save`` too); without one it starts from the weights that the actor starts from.
    """
    actor, overrides = actor_args(args), overrides_of(args, CRITIC)
    role = _role(args, CRITIC)
    for name, value in _WITHOUT_POLICY.items():
        setattr(role, name, value)
    if "save" not in overrides and actor.save is not None:
        role.save = f"{actor.save}/{CRITIC_DIRECTORY}"
    own = f"{_given_load(args)}/{CRITIC_DIRECTORY}"
    if "save" in overrides and getattr(args, "continues_own_checkpoints", False):
        own = role.save
    load = overrides.get("load", own)
    _start_from(role, args, overrides, str(load), else_weights_of=actor.load)
    return role


def _role(args: Namespace, role: str) -> Namespace:
    found = parse_megatron_role_args(args, args.megatron_config_path, role)
    for dest, field in megatron.aliases().items():
        setattr(found, field, getattr(found, dest))
    return found


def _describe(role: Namespace, args: Namespace, overrides: dict[str, Any]) -> None:
    """Let ``config.json`` of the role's own Hugging Face checkpoint say what neither flags nor the file say."""
    given = {*overrides, *args.explicit_flags}
    for name in {*model_defaults.taken(args), *_FOLLOWING} - given:
        setattr(role, name, _flag_defaults()[name])
    model_defaults.fill(role, read_config(role.load, "--megatron-config-path: load"), given)
    derive_model(role)


@cache
def _flag_defaults() -> dict[str, Any]:
    return {flag.dest: flag.default for flag in all_flags()}


def _given_load(args: Namespace) -> str | None:
    """``--load`` as it was given to the actor: before its first checkpoint, ``args.load`` is where weights are from."""
    overrides = overrides_of(args, ACTOR)
    if "load" in overrides:
        return str(overrides["load"])
    return args.save if getattr(args, "continues_own_checkpoints", False) else args.load


def _start_from(
    role: Namespace, args: Namespace, overrides: dict[str, Any], load: str, *, else_weights_of: str | None
) -> None:
    """Continue the Megatron checkpoint ``load`` when it is one, otherwise take weights alone."""
    if is_megatron_checkpoint(load):
        role.load = load
        if "ckpt_step" not in overrides and "ckpt_step" not in args.explicit_flags:
            role.ckpt_step = None  # args may have the step of --ref-load, where first weights come from
        for name in _WEIGHTS_ALONE:
            if name not in overrides:
                setattr(role, name, name in args.explicit_flags and getattr(args, name))
        return
    role.load = load if is_hf_checkpoint(load) else else_weights_of
    if role.load == load and not model_defaults.SIZES.issubset(args.explicit_flags):
        _describe(role, args, overrides)
    for name in _WEIGHTS_ALONE:
        setattr(role, name, True)

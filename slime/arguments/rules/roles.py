"""The arguments of actor and critic, and what both must agree on.

A role has the command line's values, with those of ``--megatron-config-path`` and for the critic of
``--critic-overrides``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable
from functools import cache
from typing import Any

from pydantic import AliasChoices, Field, field_validator

from slime.algorithms.estimators import WITH_CRITIC
from slime.arguments import diagnostics
from slime.arguments.args import Args
from slime.arguments.availability import unavailable_messages
from slime.arguments.command_line import all_flags, flags_where
from slime.arguments.errors import ArgumentError
from slime.arguments.files.flag_values import FlagNames, read_flags
from slime.arguments.files.schema import FileModel, validate
from slime.arguments.files.yaml_source import Document, KeyPath, seen
from slime.arguments.files.yaml_source import read as read_yaml
from slime.arguments.passthrough import megatron
from slime.arguments.rules import model_defaults
from slime.arguments.rules.checkpoints import is_hf_checkpoint, is_megatron_checkpoint
from slime.arguments.rules.hf_config import read_config
from slime.arguments.rules.megatron import derive_model, set_field_names
from slime.arguments.traits import UNSET

OPTION = "--megatron-config-path"
CRITIC_OPTION = "--critic-overrides"
ACTOR, CRITIC = "actor", "critic"
CRITIC_DIRECTORY = "critic"
"""The folder of the critic's checkpoints in the actor's ``--save`` and ``--load``, unless the file says otherwise."""
PLACEMENT_KEYS = frozenset({"num_nodes", "num_gpus_per_node"})
ROLES = ("actor", "critic")
CRITIC_VALUES: dict[str, Any] = {
    "kl_coef": 0,
    "use_opd": False,
    "custom_advantage_function_path": None,
    "untie_embeddings_and_output_weights": True,
}


def role_args(args: Args, role: str) -> Args:
    """Return what the ranks of ``role`` get: ``args`` as they are now with the role's own values; else ``args`` itself.

    The values were derived once, by ``derive``. What a run sets later (its directory, what depends on the device, the
    length of the run) is not among them and holds for the roles too.
    """
    if role == CRITIC and CRITIC not in args.role_values:
        raise ArgumentError(f"there is a critic with --advantage-estimator {WITH_CRITIC} only")
    values = args.role_values.get(CRITIC if role == CRITIC else ACTOR)
    return Args(**{**vars(args), **values}) if values else args


def derive(args: Args) -> None:
    """Set ``args.role_values``: role -> attribute -> value, of the roles that differ from the run.

    After the rules that derive sizes. Actor and critic must divide ranks and batches alike, and save to places of their
    own.
    """
    args.role_values = {}
    if args.debug_rollout_only:
        return
    of_actor, of_critic = (_checked_overrides(args, role) for role in (ACTOR, CRITIC))
    actor = _actor(args, of_actor)
    if of_actor:
        args.role_values[ACTOR] = _own_values(actor, args, of_actor)
    if args.use_critic:
        critic = _critic(args, actor, of_actor, of_critic)
        _check_together(args, actor, critic)
        args.role_values[CRITIC] = _own_values(critic, args, {*of_critic, *_values_of_critic(), *CRITIC_VALUES})


def _own_values(role: Args, args: Args, said: Collection[str]) -> dict[str, Any]:
    """Return what differs in ``role``, and what was ``said`` of it, even if equal to the run's, which may change."""
    kept = {*said, *(field for dest, field in megatron.aliases().items() if dest in said)}
    run = vars(args)
    return {
        name: value
        for name, value in vars(role).items()
        if name not in diagnostics.FINDINGS and (name in kept or name not in run or value != run[name])
    }


def _actor(args: Args, overrides: dict[str, Any]) -> Args:
    if not overrides:
        return args
    role = _role(args, ACTOR)
    if "load" in overrides:
        _start_from(role, args, overrides, str(overrides["load"]), else_weights_of=args.load)
    return role


def _critic(args: Args, actor: Args, of_actor: dict[str, Any], overrides: dict[str, Any]) -> Args:
    """Its checkpoints are in ``critic`` below the actor's unless the file gives it a ``load`` or ``save``.

    A run that resumes from what it saves reads the ``save`` too; without a checkpoint the critic starts from the
    weights that the actor starts from.
    """
    role = _role(args, CRITIC)
    for name, value in _values_of_critic().items():
        setattr(role, name, value)
    if "save" not in overrides and actor.save is not None:
        role.save = f"{actor.save}/{CRITIC_DIRECTORY}"
    if "save" in overrides and args.continues_own_checkpoints:
        own = role.save
    else:  # args.load is where the first weights are from as long as --save holds no checkpoint of the actor
        of_run = args.save if args.continues_own_checkpoints else args.load
        own = f"{of_actor.get('load', of_run)}/{CRITIC_DIRECTORY}"
    _start_from(role, args, overrides, str(overrides.get("load", own)), else_weights_of=actor.load)
    return role


def _values_of_critic() -> dict[str, Any]:
    """Return a critic's values in place of a policy's: it has no log-probs, no routing to replay, nothing to export."""
    return {flag.dest: flag.traits.critic for flag in flags_where(lambda traits: traits.critic is not UNSET)}


def _role(args: Args, role: str) -> Args:
    found = parse_megatron_role_args(args, args.megatron_config_path, role)
    set_field_names(found)
    return found


def _describe(role: Args, args: Args, overrides: dict[str, Any]) -> None:
    """Let ``config.json`` of the role's own Hugging Face checkpoint say what neither flags nor the file say."""
    given = {*overrides, *args.explicit_flags}
    defaults = {flag.dest: flag.default for flag in all_flags()}
    derived = (flag.dest for flag in flags_where(lambda traits: traits.from_sizes))
    for name in {*model_defaults.taken(args), *derived} - given:
        setattr(role, name, defaults[name])
    model_defaults.fill(role, read_config(role.load, "--megatron-config-path: load"), given)
    derive_model(role)


def _start_from(role: Args, args: Args, overrides: dict[str, Any], load: str, *, else_weights_of: str) -> None:
    """Continue the Megatron checkpoint ``load`` when it is one, otherwise take weights alone."""
    weights_alone = [flag.dest for flag in flags_where(lambda traits: traits.restarts)]
    if is_megatron_checkpoint(load):
        role.load = load
        if "ckpt_step" not in overrides and "ckpt_step" not in args.explicit_flags:
            role.ckpt_step = None  # args may have the step of --ref-load, where first weights come from
        for name in weights_alone:
            if name not in overrides:
                setattr(role, name, name in args.explicit_flags and getattr(args, name))
        return
    role.load = load if is_hf_checkpoint(load) else else_weights_of
    if role.load == load and not model_defaults.SIZES.issubset(args.explicit_flags):
        _describe(role, args, overrides)
    for name in weights_alone:
        setattr(role, name, True)


def check(args: Args) -> None:
    """The file must be right before anything starts; the roles read it when they do."""
    if args.critic_overrides and not args.use_critic:
        diagnostics.warn(args, f"{CRITIC_OPTION} has no effect without --advantage-estimator {WITH_CRITIC}")
    if args.megatron_config_path is None:
        return
    roles = read_roles(args.megatron_config_path, warn=lambda message: diagnostics.warn(args, message))
    if CRITIC in roles and not args.use_critic:
        diagnostics.warn(
            args,
            f"--megatron-config-path {args.megatron_config_path}: the values of role critic have no effect without "
            f"--advantage-estimator {WITH_CRITIC}",
        )


def _check_together(args: Args, actor: Args, critic: Args) -> None:
    if not args.compute_advantages_and_returns or args.loss_type == "sft_loss":
        other = "--loss-type sft_loss" if args.loss_type == "sft_loss" else "--disable-compute-advantages-and-returns"
        raise ArgumentError(
            f"--advantage-estimator {WITH_CRITIC} trains a critic for advantages that {other} does not use; leave one "
            "of them out"
        )
    for name in (flag.dest for flag in flags_where(lambda traits: traits.same_for_roles == "layout")):
        mine, theirs = getattr(actor, name, None), getattr(critic, name, None)
        if mine != theirs:
            raise ArgumentError(
                f"{_file(args)}{name} is {mine} for the actor and {theirs} for the critic: their ranks work on the "
                "same samples and hand values over, so both need the same; give it on the command line"
            )
    name = "virtual_pipeline_model_parallel_size"
    if getattr(critic, name, None) not in (None, getattr(actor, name, None)):
        raise ArgumentError(
            f"{_file(args)}{name} is {getattr(actor, name, None)} for the actor and {getattr(critic, name)} for the "
            "critic: micro-batches are counted for the actor's stages; use the same, or none for the critic"
        )
    if critic.save is not None and critic.save == actor.save:
        raise ArgumentError(
            f"{_file(args)}actor and critic would both write their checkpoints to --save {actor.save}; give the critic "
            f"another one, or leave its save out for {actor.save}/critic"
        )


def _checked_overrides(args: Args, role: str) -> dict[str, Any]:
    """Attribute -> value for ``role``, of ``--critic-overrides`` and of ``--megatron-config-path``, which wins."""
    overrides = overrides_of(args, args.megatron_config_path, role)
    where = f"{OPTION} {args.megatron_config_path}, role {role}" if args.megatron_config_path else CRITIC_OPTION
    for name in (flag.dest for flag in flags_where(lambda traits: traits.same_for_roles == "batches")):
        if name in overrides and overrides[name] != getattr(args, name):
            raise ArgumentError(
                f"{where}: {name} is {overrides[name]} and {getattr(args, name)} for the run, but a rollout is divided "
                "into batches once for all roles; give it on the command line"
            )
    flags = all_flags() if overrides else ()
    if refused := unavailable_messages(overrides, flags):
        raise ArgumentError("\n".join(f"{where}: {message}" for message in refused))
    of_run = {flag.dest for flag in flags if flag.traits.read_by == "run"}
    idle = [name for name in overrides if name in of_run]
    if idle:
        diagnostics.warn(
            args,
            f"{where}: {', '.join(idle)}: what concerns the whole run has no effect in a role; give it on the command "
            "line",
        )
    return overrides


def _file(args: Args) -> str:
    return f"{OPTION} {args.megatron_config_path}: " if args.megatron_config_path else ""


# The file of --megatron-config-path


class RoleEntry(FileModel):
    """Arguments of one role that differ from the run's."""

    name: str = Field(default="default", description="free text")
    role: str = Field(description="actor or critic")
    overrides: dict[str, Any] = Field(
        default_factory=dict,
        validation_alias=AliasChoices("overrides", "args"),
        description="attributes of the arguments and their values for this role",
    )

    @field_validator("overrides", mode="before")
    @classmethod
    def _nothing_is_empty(cls, value: object) -> Any:
        return {} if value is None else value


class RoleConfig(FileModel):
    """The file."""

    megatron: list[RoleEntry] = Field(description="at most one entry per role")


def read_roles(
    path: str, more_roles: Iterable[str] = (), warn: Callable[[str], object] | None = None
) -> dict[str, dict[str, Any]]:
    """Role -> attribute -> value of the file ``path``; values of flags are typed and checked as on the command line.

    ``more_roles`` are accepted beside ``ROLES``; ``warn`` receives the warnings about the file. Raises
    ``ArgumentError`` for all mistakes at once.
    """
    document = read_yaml(path, OPTION)
    config = validate(document, RoleConfig)
    roles = [entry.role for entry in config.megatron] if config is not None else []
    known = (*ROLES, *more_roles)
    for place, role in enumerate(roles):
        if role not in known:
            document.note(("megatron", place, "role"), f"expected one of {', '.join(known)}, got {role!r}")
        elif role in roles[:place]:
            document.note(("megatron", place, "role"), f"role {role} has an entry above already; merge the two")
    entries = document.value(("megatron",))
    overrides = [_overrides(document, place) for place in range(len(entries) if isinstance(entries, list) else 0)]
    document.check()
    if warn is not None:
        for message in document.warnings:
            warn(message)
    return dict(zip(roles, overrides, strict=True))


def overrides_of(args: Args, path: str | None, role: str) -> dict[str, Any]:
    """Attribute -> value for ``role``, of ``--critic-overrides`` and of the YAML file ``path``, which wins."""
    of_file = {} if path is None else read_roles(path, (role,)).get(role, {})
    # plugins bring their own namespaces
    of_flag: dict[str, Any] = getattr(args, "critic_overrides", {}) if role == "critic" else {}
    return {**of_flag, **of_file}


def parse_megatron_role_args(base_args: Args, path: str | None, role: str) -> Args:
    """A copy of ``base_args`` with the overrides that the YAML file ``path`` has for ``role``.

    A role without an entry inherits everything. The critic always gets ``CRITIC_VALUES``, and its parameters keep a CPU
    copy unless overridden. Raises ``ArgumentError``.
    """
    args = copy.deepcopy(base_args)
    overrides = overrides_of(base_args, path, role)
    where = f"{OPTION} {path}, role {role}" if path is not None else CRITIC_OPTION
    for name, value in overrides.items():
        if name in PLACEMENT_KEYS:
            message = f"{where}: {name} of role {role} is ignored; roles share the actor's placement"
            diagnostics.warn(base_args, message)
            continue
        if not hasattr(args, name):
            diagnostics.warn(base_args, f"{where}: {name}: {_flag_names().unknown(name)}")
        existing = getattr(args, name, None)
        setattr(args, name, _like(existing, value, f"{where}: {name}"))
    _derive_again(args, overrides)
    if role == "critic":
        for name, value in CRITIC_VALUES.items():
            setattr(args, name, value)
        if "disable_param_buffers_cpu_backup" not in overrides:
            args.disable_param_buffers_cpu_backup = False
    return args


def _derive_again(args: Args, overrides: dict[str, Any]) -> None:
    """Let values follow those of the role that they follow on the command line, unless they were given."""
    given = {*overrides, *getattr(args, "explicit_flags", ())}
    if "weight_decay" in overrides:
        for name in {"start_weight_decay", "end_weight_decay"} - given:
            setattr(args, name, args.weight_decay)
    if ("eps_clip" in overrides and "eps_clip_high" not in given) or overrides.get("eps_clip_high", 0) is None:
        args.eps_clip_high = args.eps_clip
    if "recompute_activations" in overrides and "recompute_granularity" not in given:
        args.recompute_granularity = "selective" if args.recompute_activations else None


def _overrides(document: Document, place: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in ("overrides", "args"):
        at: KeyPath = ("megatron", place, key)
        if isinstance(document.value(at), dict):
            of_flags, others = read_flags(document, at, _flag_names())
            found |= of_flags | {name.replace("-", "_"): document.value(where) for name, where in others.items()}
    return found


@cache
def _flag_names() -> FlagNames:
    return FlagNames.of(all_flags())


def _like(existing: object, value: object, where: str) -> Any:
    """``value`` with the type of the number it replaces: attributes of plug-ins have no flag that types them."""
    if not isinstance(value, str) or isinstance(existing, bool) or not isinstance(existing, int | float):
        return value
    try:
        return type(existing)(value)
    except ValueError as error:
        raise ArgumentError(f"{where}: expected {type(existing).__name__}, got {seen(value)}") from error

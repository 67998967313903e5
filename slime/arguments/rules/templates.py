"""Path templates: every name in braces must be one that is filled in, and those that tell files apart must be there."""

from __future__ import annotations

import string
from argparse import Namespace

from slime.arguments.errors import ArgumentError

# Attribute -> (names that are filled in, names without which one file would overwrite the last, an example).
TEMPLATES: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "save_debug_rollout_data": (("rollout_id",), ("rollout_id",), "dumps/{rollout_id}.pt"),
    "save_debug_train_data": (("rollout_id", "rank"), ("rollout_id",), "dumps/{rollout_id}.pt"),
    "load_debug_rollout_data": (("rollout_id",), (), "dumps/{rollout_id}.pt"),
    "load_forge_rollout_data": (("rollout_id",), (), "dumps/{rollout_id}.pt"),
    "save_hf": (("rollout_id",), ("rollout_id",), "exports/{rollout_id}"),
    "ci_save_grad_norm": (
        ("role", "rollout_id", "step_id"), ("rollout_id", "step_id"), "norms/{role}_{rollout_id}_{step_id}.pt",
    ),
    "ci_load_grad_norm": (("role", "rollout_id", "step_id"), (), "norms/{role}_{rollout_id}_{step_id}.pt"),
}  # fmt: skip


def check(args: Namespace) -> None:
    """Refuse templates that cannot be filled in, and those whose files would overwrite each other."""
    for attribute, (known, needed, example) in TEMPLATES.items():
        template = getattr(args, attribute)
        if template is None:
            continue
        given = f"--{attribute.replace('_', '-')} {template}"
        found = _names(template, given, example)
        unknown = [name for name in found if name not in known]
        if unknown:
            raise ArgumentError(
                f"{given}: {{{unknown[0]}}} is nothing that can be filled in; there is "
                f"{' and '.join(f'{{{name}}}' for name in known)}, for example {example}"
            )
        if attribute == "ci_save_grad_norm" and args.advantage_estimator == "ppo":
            needed = (*needed, "role")
        if _is_written_once(args, attribute):
            needed = tuple(name for name in needed if name != "rollout_id")
        absent = [name for name in needed if name not in found]
        if absent:
            every = {"rollout_id": "rollout", "step_id": "step", "role": "role"}[absent[0]]
            raise ArgumentError(
                f"{given} has no {{{absent[0]}}} in it, so every {every} would overwrite the last one; "
                f"write for example {example}"
            )


def _is_written_once(args: Namespace, attribute: str) -> bool:
    """Whether there is one rollout to write; evaluations are dumped to the path of rollouts too."""
    return args.num_rollout == 1 and (attribute != "save_debug_rollout_data" or args.eval_interval is None)


def _names(template: str, given: str, example: str) -> list[str]:
    try:
        return [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ArgumentError(f"{given}: {error}; write for example {example}") from error

"""Environments for ``slime.rollout.environments.generate``."""

from __future__ import annotations

from slime.arguments.group import ArgumentGroup, DottedPath, flag


class Environments(ArgumentGroup):
    """Which environments agents act in."""

    title = "environments"

    environment_path: list[DottedPath] | None = flag(
        None,
        "dotted paths of environment classes, with --custom-generate-function-path "
        "slime.rollout.environments.generate; all have the same weight",
    )
    environment_config: str | None = flag(
        None, "YAML file of environments with weights, limits and difficulties, in place of --environment-path"
    )

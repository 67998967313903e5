"""Values of single roles (``--megatron-config-path``)."""

from __future__ import annotations

from argparse import Namespace

from slime.arguments import unchecked
from slime.arguments.files.role_config import read_roles


def check(args: Namespace) -> None:
    """The file must be right before anything starts; the roles read it when they do."""
    if args.megatron_config_path is None:
        return
    roles = read_roles(args.megatron_config_path)
    if "critic" in roles and not args.use_critic:
        unchecked.warn(
            args,
            f"--megatron-config-path {args.megatron_config_path}: the values of role critic have no effect without "
            "--advantage-estimator ppo",
        )

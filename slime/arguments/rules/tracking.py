"""Trackers."""

from __future__ import annotations

import os
from argparse import Namespace

from slime.arguments.errors import ArgumentError


def check(args: Namespace) -> None:
    """TensorBoard needs a place to write to."""
    if args.use_tensorboard and args.tb_project_name is None and not os.environ.get("TENSORBOARD_DIR"):
        raise ArgumentError(
            "--use-tensorboard needs --tb-project-name NAME or the environment variable TENSORBOARD_DIR"
        )

"""Environments and the generate function that runs them."""

from __future__ import annotations

from argparse import Namespace

from slime.arguments import diagnostics
from slime.arguments.errors import ArgumentError
from slime.arguments.files.environments import environments_of
from slime.arguments.rules.data import check_file

PACKAGE = "slime.rollout.environments"
GENERATE = f"{PACKAGE}.generate"
DATA_SOURCE = f"{PACKAGE}.EnvironmentDataSource"


def check(args: Namespace) -> None:
    """Environments need the function that runs them, and it needs environments; both flags at once are ambiguous."""
    if args.environment_config is not None and args.environment_path:
        raise ArgumentError(
            f"--environment-config {args.environment_config} and --environment-path both name environments; list "
            "them in the file"
        )
    entries, paths = environments_of(args), args.environment_path or []
    if len(entries) < len(paths):
        raise ArgumentError(
            f"--environment-path {' '.join(paths)}: two classes have the same name; give them names "
            "in a file for --environment-config"
        )
    of_data_sets = [dataset.custom_generate_function_path for dataset in args.eval_datasets]
    runs = GENERATE in (args.custom_generate_function_path, *of_data_sets)
    if runs and not entries:
        raise ArgumentError(f"{GENERATE} needs environments; give --environment-path or --environment-config")
    if args.data_source_path == DATA_SOURCE:
        if not entries:
            raise ArgumentError(
                f"--data-source-path {DATA_SOURCE} needs environments; give --environment-path or --environment-config"
            )
        if args.prompt_data is not None and args.rollout_global_dataset:
            check_file(args, f"--prompt-data {args.prompt_data}", args.prompt_data)
    if entries and not runs:
        option = "--environment-config" if args.environment_config is not None else "--environment-path"
        diagnostics.warn(args, f"{option} has no effect without --custom-generate-function-path {GENERATE}")

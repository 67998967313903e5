"""Looking up every function that a flag names, those of the trainer too, and comparing signatures."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from slime.arguments.files.environments import environments_of
from slime.first_look import Findings
from slime.rollout.hooks.contracts import CONTRACTS, ENVIRONMENT, Contract
from slime.rollout.hooks.hook import checked_hook
from slime.utils.user_code import root_cause, users_line

_NOT_HERE = (
    "torch",
    "ray",
    "megatron",
    "sglang",
    "sglang_router",
    "transformers",
    "flash_attn",
    "transformer_engine",
    "triton",
)
"""Packages of a training machine, which one that only plans need not have."""


def look_at_hooks(args: Namespace, dry_run: bool, found: Findings) -> bool:
    """Report every hook that cannot be imported or called; return whether all can be."""
    good = True
    for path, contract, flag in _named(args):
        found.begins(f"the import of {flag} {path}")
        try:
            checked_hook(path, contract, flag)
        except Exception as e:  # noqa: BLE001  (whatever a user's module raises is reported)
            good = False
            root = root_cause(e)
            missing = (root.name or "").partition(".")[0] if isinstance(root, ModuleNotFoundError) else ""
            if dry_run and missing in _NOT_HERE:
                found.unchecked.append(f"{flag} {path}: {missing} is not installed on this machine")
                continue
            line = users_line(e)
            found.errors.append(f"{e} (at {line})" if line else str(e))
        except SystemExit as e:
            good = False
            found.errors.append(f"{flag} {path}: importing its module called exit({e.code}) (at {users_line(e)})")
    return good


def _named(args: Namespace) -> Iterator[tuple[str, Contract, str]]:
    """Every dotted path, how its function is called, and the flag (or place in a file) that names it."""
    replays = args.load_debug_rollout_data is not None
    contracts = {name: c for name, c in CONTRACTS.items() if not (replays and c.generates)}
    if not args.debug_rollout_only:
        contracts |= _of_trainer(args)
    for name, contract in contracts.items():
        value = getattr(args, name, None) or []
        for path in [value] if isinstance(value, str) else value:
            yield path, contract, contract.flag
    for entry in environments_of(args).values() if not replays else []:
        yield entry.path, ENVIRONMENT, f"environment {entry.name!r}"
    for dataset in [] if replays or args.eval_interval is None else args.eval_datasets:
        for name in ("custom_generate_function_path", "custom_rm_path"):
            if path := getattr(dataset, name, None):
                yield path, CONTRACTS[name], f"--eval-config, data set {dataset.name!r}, {name}"


def _of_trainer(args: Namespace) -> dict[str, Contract]:
    from slime.backends.megatron_utils import hooks, import_megatron

    given = {name: contract for name, contract in hooks.CONTRACTS.items() if getattr(args, name, None)}
    if given:
        import_megatron()  # modules of trainer hooks find Megatron as it is in a trainer
    return given

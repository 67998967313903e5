"""The process that looks: reads the arguments from stdin, writes each finding as a line of JSON."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from slime.first_look import Findings
from slime.first_look.data import look_at_data
from slime.first_look.reward import look_at_reward
from slime.first_look.start import DEADLINE_S
from slime.rollout.hooks.contracts import CONTRACTS, Contract
from slime.rollout.hooks.hook import checked_hook
from slime.utils.hf_checkpoint import HfCheckpoint
from slime.utils.user_code import root_cause, users_line

WEIGHT_FLAGS = ("hf_checkpoint", "ref_load", "opd_teacher_load", "load")
"""``--load`` may have taken its value from the others."""

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


class _Lines(list[str]):
    """A list whose entries are written when they are appended."""

    def __init__(self, out: IO[str], kind: str) -> None:
        super().__init__()
        self.out, self.kind = out, kind

    def append(self, text: str) -> None:
        super().append(text)
        print(json.dumps({"kind": self.kind, "text": text}), file=self.out, flush=True)


class _Reported(Findings):
    def __init__(self, out: IO[str]) -> None:
        super().__init__(_Lines(out, "errors"), _Lines(out, "warnings"), _Lines(out, "unchecked"))
        self.steps = _Lines(out, "begins")

    def begins(self, what: str) -> None:
        self.steps.append(what)


def main() -> None:
    """Look, and end at once: threads of users' code are not waited for."""
    signal.alarm(int(DEADLINE_S) + 30)  # in case the parent is gone and cannot end this process
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what users' code prints is no finding
    args, dry_run = pickle.load(sys.stdin.buffer)
    sys.argv[:] = [str(Path(sys.argv[0]))]
    look(args, dry_run, _Reported(out))
    print(json.dumps({"kind": "done"}), file=out, flush=True)
    os._exit(0)


def look(args: Namespace, dry_run: bool, found: Findings) -> None:
    """Look at everything; the cheap things come first, and one mistake does not hide another."""
    look_at_weights(args, found)
    samples: dict[str, Any] = look_at_data(args, dry_run, found)
    if look_at_hooks(args, dry_run, found):
        look_at_reward(args, samples, found)


def look_at_weights(args: Namespace, found: Findings) -> None:
    """Open every safetensors file, whose header says whether it is whole; report those of ``WEIGHT_FLAGS`` that are
    missing or cannot be read. Other formats have none."""
    flag_of: dict[str, str] = {}
    for name in WEIGHT_FLAGS:
        if directory := getattr(args, name):
            flag_of.setdefault(directory, f"--{name.replace('_', '-')}")
    for directory, flag in flag_of.items():
        if not any(Path(directory).glob("*.safetensors*")):
            continue
        found.begins(f"the files of {flag} {directory}")
        try:
            with HfCheckpoint(directory, framework="numpy") as checkpoint:
                checkpoint.open_all()
        except (ValueError, OSError) as e:
            found.errors.append(f"{flag}: {e}")


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

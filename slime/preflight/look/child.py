"""The process that looks: reads the arguments from stdin, writes each finding as a line of JSON."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
from pathlib import Path
from typing import IO, Any

from slime.arguments.args import Args
from slime.preflight.look import Findings
from slime.preflight.look.checkpoint import look_at_adapters, look_at_tokenizer_files, look_at_weights
from slime.preflight.look.data import look_at_data
from slime.preflight.look.hooks import look_at_hooks, look_at_labels, look_at_reward, look_at_services
from slime.preflight.look.start import DEADLINE_S


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


def look(args: Args, dry_run: bool, found: Findings) -> None:
    """Look at everything; the cheap things come first, and one mistake does not hide another."""
    look_at_weights(args, found)
    look_at_adapters(args, found)
    if args.serve_only and not args.sglang_skip_tokenizer_init:
        look_at_tokenizer_files(args, found)
    samples: dict[str, Any] = look_at_data(args, dry_run, found)
    look_at_labels(args, samples, found)
    if look_at_hooks(args, dry_run, found):
        look_at_reward(args, samples, found)
        look_at_services(args, dry_run, found)

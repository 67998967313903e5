"""Configurations that the command line accepts pass SGLang's own checks of its arguments too."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

from hypothesis import HealthCheck, given, settings

from slime.arguments import ArgumentError, finalize_for_device
from slime.arguments.command_line import all_flags, build_parser
from slime.arguments.parse import resolve
from slime.backends.sglang_utils.environment import engine_environment
from tests.support.command_lines import command_lines, with_files
from tests.support.engine_commands import engine_commands
from tools.tiny_model import make_tiny_checkpoint

CHECK = """
import json, sys
from sglang.srt.server_args import prepare_server_args
failed = []
for words in json.load(open(sys.argv[1])):
    try:
        server = prepare_server_args(words)
        server.resolve_once()
        server.check_server_args()
    except Exception as error:
        failed.append(f"{type(error).__name__}: {error}\\n    {' '.join(words)}")
print("\\nFAILED " + json.dumps(failed))
"""


def test_sglang_accepts_the_engines_of_accepted_command_lines(tmp_path: Path) -> None:
    """One process of SGLang reads the arguments of every engine that differs from the others."""
    commands = engines_of_random_lines(tmp_path, str(make_tiny_checkpoint(tmp_path / "model", "qwen3", seed=1)))
    assert len(commands) >= 10
    (tmp_path / "words.json").write_text(json.dumps(commands))
    done = subprocess.run(
        [sys.executable, "-c", CHECK, str(tmp_path / "words.json")],
        env=engine_environment(device_type="cpu"),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    failed = json.loads(done.stdout.rpartition("FAILED ")[2])
    assert not failed, f"{len(failed)} of {len(commands)} engines:\n" + "\n".join(failed[:5])


def engines_of_random_lines(folder: Path, model: str) -> list[list[str]]:
    """Arguments of the first node of engines, one of every kind, for dense models on this machine's device."""
    flags = all_flags()
    parser = build_parser(flags)
    found: dict[str, list[str]] = {}

    @settings(max_examples=300, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(command_lines(moe=False))
    def collect(line: str) -> None:
        words = [word for word in shlex.split(line) if word not in ("--bf16", "--fp16")]  # they need a GPU
        try:
            args = resolve(with_files(words, folder), flags, parser)
            finalize_for_device(args, "cpu")
        except ArgumentError:
            return
        if args.debug_train_only or args.rollout_external:
            return
        for _, node_rank, command in engine_commands(args, model):
            kind = " ".join(word for word in command if "seed" not in word)
            if node_rank == 0:
                found.setdefault(kind, command)

    collect()
    return list(found.values())

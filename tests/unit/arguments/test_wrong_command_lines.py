"""Wrong command lines end with status 2 and one sentence that names the flags and the way out."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from slime.arguments import ArgumentError, parse_args
from tests.support.arguments import minimal_flags

CASES = yaml.safe_load((Path(__file__).parents[2] / "data" / "arguments" / "wrong_command_lines.yaml").read_text())


@pytest.mark.parametrize("case", CASES, ids=[case["flags"] for case in CASES])
def test_message_and_status(case, monkeypatch, capsys):
    words = minimal_flags()
    monkeypatch.setattr(sys, "argv", ["train.py", *words, *shlex.split(case["flags"])])
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    with pytest.raises(SystemExit) as caught:
        parse_args()
    assert caught.value.code == 2
    expected = case["error"].replace("CKPT", words[words.index("--hf-checkpoint") + 1])
    assert f"train.py: error: {expected}" in capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("left_out", "values", "message"),
    [
        ("--hf-checkpoint", 1, r"missing: --hf-checkpoint \("),
        ("--rollout-batch-size", 1, r"missing: --rollout-batch-size \(prompts per rollout\)"),
        ("--global-batch-size", 1, "give --global-batch-size, or --num-steps-per-rollout"),
        ("--num-rollout", 1, "Give --num-rollout or --num-epoch"),
        ("--prompt-data", 1, "--prompt-data is missing; --disable-rollout-global-dataset"),
        ("--rollout-num-gpus", 1, "--rollout-num-gpus is missing: .* With --colocate"),
        ("--num-layers", 1, "--num-layers missing; the checkpoint's values are: --num-layers 2 --hidden-size 64"),
        ("--vocab-size", 1, "--vocab-size is missing"),
    ],
)
def test_what_is_needed_is_asked_for(left_out, values, message):
    words = minimal_flags()
    place = words.index(left_out)
    del words[place : place + 1 + values]
    with pytest.raises(ArgumentError, match=message):
        parse_args(words)


def test_the_suggested_model_flags_are_right():
    """What the message about missing model flags proposes is accepted as it stands."""
    words = minimal_flags()
    words = words[: words.index("--num-layers")]
    with pytest.raises(ArgumentError) as caught:
        parse_args(words)
    suggested = str(caught.value).split("the checkpoint's values are: ")[1]
    assert parse_args([*words, *shlex.split(suggested)]).num_layers == 2


def test_reading_only_the_beginning_of_the_help_is_no_error():
    command = f"{sys.executable} -m slime.arguments --help all | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert "flags" in done.stdout
    assert done.stderr == ""


def test_a_process_exits_with_2_and_no_traceback():
    command = [sys.executable, "-m", "slime.arguments", "--rollout-batch-sizes", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "did you mean --rollout-batch-size?" in done.stderr
    assert "Traceback" not in done.stderr

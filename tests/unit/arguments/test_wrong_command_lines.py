"""Wrong command lines end with status 2 and one sentence that names the flags and the way out."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from slime.arguments import ArgumentError, parse_args
from tests.support.arguments import CONFIG, minimal_flags

CASES = yaml.safe_load((Path(__file__).parents[2] / "data" / "arguments" / "wrong_command_lines.yaml").read_text())

OF_YOUR_OWN = (
    "flags of your own code are declared by a function that --custom-arguments-path names; --ignore-unknown-flags "
    "drops such flags with a warning"
)


@pytest.fixture(scope="module")
def megatron(tmp_path_factory):
    """A directory that looks like a Megatron checkpoint of step 3."""
    directory = tmp_path_factory.mktemp("megatron")
    (directory / "iter_0000003").mkdir()
    (directory / "latest_checkpointed_iteration.txt").write_text("3")
    return str(directory)


def filled(text, places):
    """``text`` with the words of ``places`` replaced by paths."""
    for word, path in places.items():
        text = text.replace(word, path)
    return text


def words_of(case, places):
    """The command line of a case."""
    return [*minimal_flags(), *(filled(word, places) for word in shlex.split(case["flags"]))]


@pytest.fixture
def places(megatron, tmp_path):
    words = minimal_flags()
    return {
        "CKPT": words[words.index("--hf-checkpoint") + 1],
        "MEGATRON": megatron,
        "@FILE@": str(tmp_path / "file.yaml"),
    }


@pytest.mark.parametrize("case", CASES, ids=[f"{i} {case['flags'][:80]}" for i, case in enumerate(CASES)])
def test_message_and_status(case, places, monkeypatch, capsys):
    """All that is printed is the message; nothing goes to stdout, and nothing is printed about a traceback."""
    Path(places["@FILE@"]).write_text(case.get("file", ""))
    monkeypatch.setattr(sys, "argv", ["train.py", *words_of(case, places)])
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    with pytest.raises(SystemExit) as caught:
        parse_args()
    assert caught.value.code == 2
    printed = capsys.readouterr()
    lines = filled(case["error"], places).splitlines()
    lines += [OF_YOUR_OWN] if any(line.startswith("unknown flag") for line in lines) else []
    expected = [f"train.py: error: {line}" for line in lines]
    assert printed.err.splitlines() == [*expected, "`--help WORD` lists the flags that mention WORD."]
    assert printed.out == ""


def test_every_message_names_what_was_wrong():
    """The first word of the flags that were added, or the file they name, is in every message; none is a fragment."""
    for case in CASES:
        words = [w.split("=")[0] for w in shlex.split(case["flags"]) if w != "--dry-run"]
        named = [w for w in words if w.startswith("-") or w == words[0]]
        assert any(word in case["error"] for word in named) or "pipeline" in case["error"], case
        assert len(case["error"].split()) >= 4, case


@pytest.mark.parametrize(
    ("left_out", "values", "message"),
    [
        ("--hf-checkpoint", 1, r"missing: --hf-checkpoint \("),
        ("--rollout-batch-size", 1, r"missing: --rollout-batch-size \(prompts per rollout\)"),
        ("--global-batch-size", 1, "give --global-batch-size, or --num-steps-per-rollout"),
        ("--num-rollout", 1, "Give --num-rollout or --num-epoch"),
        ("--prompt-data", 1, "--prompt-data is missing; --disable-rollout-global-dataset"),
        ("--rollout-num-gpus", 1, "--rollout-num-gpus is missing: .* With --colocate"),
        ("--rollout-max-response-len", 1, r"how long may a response get\? Give --rollout-max-response-len, or"),
    ],
)
def test_what_is_needed_is_asked_for(left_out, values, message):
    words = minimal_flags()
    place = words.index(left_out)
    del words[place : place + 1 + values]
    with pytest.raises(ArgumentError, match=message):
        parse_args(words)


def test_the_suggested_model_flags_are_right(tmp_path):
    """The flags that the message about an unknown family suggests are accepted unchanged."""
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "model_type": "other"}))
    words = minimal_flags()
    words = [*words[: words.index("--num-layers")], "--hf-checkpoint", str(tmp_path), "--model-name", "llama"]
    with pytest.raises(ArgumentError) as caught:
        parse_args(words)
    suggested = str(caught.value).split("the checkpoint's values are: ")[1].split(";")[0]
    assert parse_args([*words, *shlex.split(suggested)]).num_layers == 2


def test_reading_only_the_beginning_of_the_help_is_no_error():
    command = f"{sys.executable} -m slime.arguments --help all | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert "flags" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rollout-batch-sizes", "8"], "did you mean --rollout-batch-size?"),
        (["--rollout-batch-size", "many"], "--rollout-batch-size: expected an integer, got 'many'"),
        ([*minimal_flags(), "--global-batch-size", "8"], "fewer than --global-batch-size 8"),
    ],
)
def test_a_process_exits_with_2_and_no_traceback(flags, message):
    command = [sys.executable, "-m", "slime.arguments", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert "Traceback" not in done.stderr

"""Flags that ``slime serve`` reads from a command line, and those that may be left out."""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path

import pytest

from slime.__main__ import main
from slime.arguments import ArgumentError, parse_args
from slime.arguments.placement import engines_of
from slime.arguments.rules.hf_config import read_config
from slime.preflight.plan import plan
from slime.preflight.plan.render import summary_text
from slime.ray.manager.engines.members import Members
from slime.ray.manager.engines.served_model import served_models
from tests.support.arguments import minimal_flags, parse
from tools.tiny_model import make_tiny_checkpoint

CHECKPOINT = minimal_flags()[1]
ONE_FILE = f"""
sglang:
  - name: policy
    model_path: {CHECKPOINT}
    server_groups: [{{num_gpus: 1}}, {{num_gpus: 1, overrides: {{max_running_requests: 8}}}}]
  - name: judge
    model_path: {CHECKPOINT}/
    server_groups: [{{num_gpus: 2, num_gpus_per_engine: 2}}]
"""


def serve(*words: str) -> Namespace:
    return parse_args([str(word) for word in words], serve=True)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "engines.yaml"
    path.write_text(ONE_FILE)
    return str(path)


def test_a_checkpoint_is_enough() -> None:
    args = serve("--hf-checkpoint", CHECKPOINT)
    assert args.serve_only
    assert args.debug_rollout_only
    assert args.use_fault_tolerance
    assert args.num_rollout == 0
    assert [plan.num_gpus for plan in engines_of(args)] == [1]
    assert [plan.num_gpus for plan in engines_of(serve("--hf-checkpoint", CHECKPOINT, "--rollout-num-gpus", "3"))] == [
        1, 1, 1,
    ]  # fmt: skip
    one = serve("--hf-checkpoint", CHECKPOINT, "--rollout-num-gpus-per-engine", "2")
    assert [plan.num_gpus for plan in engines_of(one)] == [2]


def test_a_file_is_enough(file: str) -> None:
    args = serve("--sglang-config", file)
    assert (args.hf_checkpoint, args.rollout_num_gpus) == (CHECKPOINT, 4)
    assert [(plan.model, plan.num_gpus) for plan in engines_of(args)] == [("policy", 1), ("policy", 1), ("judge", 2)]
    with pytest.raises(ArgumentError, match=r"policy 2 \+ judge 2 = 4 slots, but --rollout-num-gpus is 2"):
        serve("--sglang-config", file, "--rollout-num-gpus", "2")


def test_a_file_without_checkpoints_needs_the_flag(tmp_path: Path) -> None:
    path = tmp_path / "engines.yaml"
    path.write_text("sglang: [{name: policy, server_groups: [{num_gpus: 1}]}]")
    with pytest.raises(ArgumentError, match="missing: --hf-checkpoint"):
        serve("--sglang-config", str(path))
    assert serve("--sglang-config", str(path), "--hf-checkpoint", CHECKPOINT).rollout_num_gpus == 1


def test_no_model_waits_for_weights(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = serve("--sglang-config", file, "--hf-checkpoint", "/models/another")
    assert [model.update_weights for model in served_models(args, engines_of(args), Members())] == [False, False]
    one = serve("--hf-checkpoint", CHECKPOINT)
    assert [model.update_weights for model in served_models(one, engines_of(one), Members())] == [False]
    assert capsys.readouterr().err == ""  # there is no trainer whose weights a model could miss


def test_what_is_missing_and_what_is_wrong_is_said_as_ever() -> None:
    with pytest.raises(ArgumentError) as missing:
        serve()
    assert str(missing.value).startswith("missing: --hf-checkpoint")
    assert "rollout-batch-size" not in str(missing.value)
    with pytest.raises(ArgumentError, match="unknown flag --rollout-num-gpu; did you mean --rollout-num-gpus"):
        serve("--hf-checkpoint", CHECKPOINT, "--rollout-num-gpu", "2")
    with pytest.raises(ArgumentError, match="--debug-train-only exclude each other"):
        serve("--hf-checkpoint", CHECKPOINT, "--debug-train-only")


def test_the_flags_of_a_run_may_stay() -> None:
    args = serve(*minimal_flags(), "--prompt-data", "/no/such/prompts.jsonl", "--rollout-num-gpus", "2")
    assert args.serve_only
    assert args.rollout_num_engines == 2
    assert serve(*minimal_flags(), "--colocate").rollout_num_engines == 1
    assert not parse().serve_only


def without_prompts(*words: str) -> Namespace:
    return parse_args(["--hf-checkpoint", CHECKPOINT, "--debug-rollout-only", "--rollout-num-gpus", "1", *words])


def test_rollouts_alone_without_anything_to_generate_serve() -> None:
    assert without_prompts().serve_only
    assert not parse("--debug-rollout-only").serve_only


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (["--num-rollout", "2"], "--prompt-data is missing"),
        (["--num-epoch", "2"], "--prompt-data is missing"),
        (["--disable-rollout-global-dataset"], "how long is the run?"),
        (["--rollout-function-path", "my.generate"], "--prompt-data is missing"),
        (["--data-source-path", "my.Source"], "how long is the run?"),
    ],
)
def test_whoever_says_what_to_generate_is_asked_for_the_rest(words: list[str], missing: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        without_prompts(*words)
    assert missing in str(caught.value)


def test_the_plan_has_no_rollouts(file: str) -> None:
    args = serve("--sglang-config", file)
    assert read_config(CHECKPOINT)["model_type"] == "qwen3"
    assert plan(args).loop.kind == "serving"
    text = summary_text(args)
    assert "no rollouts: engines and routers serve until a signal ends them" in text
    assert "serving manager" in text
    assert "Batches" not in text
    assert "A real run would start" in text
    assert "It fits on GPUs from 24 GB" in text


@pytest.mark.parametrize("words", [(), ("--rollout-num-gpus-per-engine", "2")])
def test_the_plan_counts_the_memory_of_engines_that_a_checkpoint_describes(words: tuple[str, ...]) -> None:
    text = summary_text(serve("--hf-checkpoint", CHECKPOINT, *words))
    assert "No estimate" not in text
    assert "of cache:" in text
    assert "trainer" not in text.partition("Memory")[2].partition("GPU ")[0]


def test_a_path_that_is_wrong_is_refused_at_once(tmp_path: Path) -> None:
    for words in (("--hf-checkpoint", "nope"), ("--hf-checkpoint", str(tmp_path / "nope"))):
        with pytest.raises(ArgumentError, match=r"nope: there is no .*nope/config.json"):
            serve(*words)
        with pytest.raises(ArgumentError, match="there is no"):
            parse("--debug-rollout-only", *words)
    serve("--hf-checkpoint", "Qwen/Qwen3-4B")  # the engines fetch it


def test_files_are_looked_at_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(make_tiny_checkpoint(tmp_path / "model"), broken)
    (broken / "model.safetensors").unlink()
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--hf-checkpoint", str(broken)])
    assert caught.value.code == 2
    assert f"--hf-checkpoint {broken}: expected weights in *.safetensors files; it has none" in capsys.readouterr().err

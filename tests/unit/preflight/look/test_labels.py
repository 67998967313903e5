"""Labels of every kind that files hold: used, or reported before the run, never reward 0 for all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.arguments import ArgumentError
from tests.support.arguments import dry, parse


def rows(*labels, **more):
    return [{"prompt": [{"role": "user", "content": "6*7="}], "label": label, **more} for label in labels]


@pytest.mark.parametrize("kind", ["math", "boxed_math", "dapo", "f1"])
@pytest.mark.parametrize(
    "label",
    [
        "42", 42, 42.0, ["42", "forty-two"], {"ground_truth": "42"}, "so it is\n#### 42", '["42"]',
        '{"ground_truth": "42"}',
    ],
)  # fmt: skip
def test_labels_that_can_be_used(found, prompts, kind, label):
    key = ["--reward-key", "score"] if "dapo" in kind else []
    said = found("--prompt-data", prompts(*rows(label)), "--rm-type", kind, *key)
    assert (said.errors, said.warnings) == ([], [])


@pytest.mark.parametrize("kind", ["math", "f1"])
@pytest.mark.parametrize("label", [{}, {"style": "rule"}])
def test_labels_that_cannot(found, prompts, kind, label):
    [said] = found("--prompt-data", prompts(*rows("42", label)), "--rm-type", kind).errors
    assert "row 1: --rm-type" in said
    assert "a label that is an object needs one of the keys ground_truth," in said


def test_a_row_without_a_label_is_named(found, prompts):
    [said] = found("--prompt-data", prompts(*rows("1", "2", None)), "--rm-type", "math").errors
    assert "row 2: --rm-type math compares answers with labels, and this row has none" in said


def test_a_solution_is_no_final_answer(found, prompts):
    [said] = found("--prompt-data", prompts(*rows("We add. " * 60)), "--rm-type", "math").warnings
    assert "as a solution has" in said
    assert "#### ANSWER" in said


def test_options_that_cannot_be_chosen(found, prompts):
    path = prompts(*rows("Z", metadata={"choices": ["red", "green"]}))
    [said] = found("--prompt-data", path, "--rm-type", "gpqa", "--metadata-key", "metadata").warnings
    assert "the label itself, given as the answer, gets no full reward" in said
    path = prompts(*rows("green", 1, "B", "1", metadata={"choices": ["red", "green"]}))
    assert found("--prompt-data", path, "--rm-type", "gpqa", "--metadata-key", "metadata").warnings == []


def test_a_key_for_rewards_that_have_none(found, prompts):
    [said] = found("--prompt-data", prompts(*rows("42")), "--rm-type", "math", "--reward-key", "score").errors
    assert "--rm-type math gives numbers; leave out --reward-key score" in said


def test_reasoning_that_never_ends(found, flags, prompts):
    words = ["--prompt-data", prompts(*rows("42")), "--rm-type", "deepscaler"]
    checkpoint = Path(flags[flags.index("--hf-checkpoint") + 1])
    writes = any(
        b"</think>" in (checkpoint / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")
    )
    assert ["grades what follows </think>" in said for said in found(*words).warnings] == ([] if writes else [True])


@pytest.mark.parametrize("kind", ["dapo", "boxed_dapo"])
def test_dapo_needs_a_key(kind):
    for words in ((), ("--reward-key", "pred"), ("--reward-key", "right")):
        with pytest.raises(
            ArgumentError, match="--reward-key has to name the entry that is the reward, one of score, acc"
        ):
            dry("--rm-type", kind, *words)
    assert dry("--rm-type", kind, "--reward-key", "score").reward_key == "score"
    assert dry("--rm-type", kind, "--custom-reward-post-process-path", "mine.f").rm_type == kind


def test_dapo_needs_a_key_in_evaluation_too(tmp_path):
    file = tmp_path / "eval.yaml"
    file.write_text("datasets: [{name: a, path: p, rm_type: dapo}]")
    with pytest.raises(
        ArgumentError, match="data set a: rm_type dapo gives objects, and --eval-reward-key has to name"
    ):
        dry("--eval-config", file)
    assert dry("--eval-config", file, "--eval-reward-key", "acc").eval_reward_key == "acc"


def test_math_verify_is_installed_or_refused(monkeypatch):
    from slime.arguments.rules import rollout

    monkeypatch.setattr(rollout.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match=r'math-verify is not installed; pip install "slime\[math\]"'):
        parse("--rm-type", "math_verify")
    assert any("math-verify" in said for said in dry("--rm-type", "math_verify").unchecked)

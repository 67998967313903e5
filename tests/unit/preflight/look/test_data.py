"""Mistakes in prompt files and in the flags that name their columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime.arguments import parse_args
from slime.preflight.look import Findings
from slime.preflight.look.child import look
from slime.preflight.look.data import FIRST_ROWS, OTHER_ROWS, first_rows, look_at_data
from slime.utils.processing_utils import encode_image_for_rollout_engine
from tests.support.arguments import dry
from tests.support.run_train import sft_flags
from tests.support.vision_models import drawing, make_vision_checkpoint

CHAT = {"prompt": [{"role": "user", "content": "1+1="}], "label": "2"}


def test_a_sound_run_is_not_interrupted(found, prompts):
    for flags in ([], ["--eval-interval", 1, "--eval-prompt-data", "e", prompts(CHAT)]):
        findings = found(*flags)
        assert (findings.errors, findings.warnings, findings.unchecked) == ([], [], [])


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--input-key question", "row 0: there is no column --input-key question; the row has label, prompt"),
        ("--label-key answer", "row 0: there is no column --label-key answer; the row has label, prompt"),
        ("--metadata-key prompt", "column 'prompt' must hold an object, got list"),
    ],
)
def test_columns(words, error, found):
    [said] = found(*words.split()).errors
    assert said.endswith(error)


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        ([{**CHAT, "prompt": 5}], "row 0: column --input-key prompt holds int 5; expected a string or a list of chat"),
        ([CHAT, {**CHAT, "prompt": [{"content": "x"}]}], "row 1: column --input-key prompt holds list [{'content'"),
        ([CHAT, CHAT, {"prompt": "x"}], "row 2: there is no column --label-key label"),
        ([b"1,2"], "none of its 1 lines is a JSON object"),
        ([b""], "holds no row"),
        ([{**CHAT, "prompt": [{"role": "user"}]}], "prompts.jsonl: "),  # whatever the template says to it
    ],
)
def test_rows(rows, error, found, prompts):
    [said] = found("--prompt-data", prompts(*rows)).errors
    assert error in said
    assert "--prompt-data" in said


def test_a_line_that_is_not_utf8_is_named(found, prompts):
    [said] = found("--prompt-data", prompts(CHAT, b'{"prompt": "caf\xe9", "label": "1"}')).warnings
    assert "line 2 is no JSON and is skipped: 'utf-8' codec can't decode byte 0xe9" in said


def test_rows_far_into_the_file(found, prompts):
    """Those that are looked at lie at equal distances; a mistake in all that follows a place is found, by its line."""
    good, bad = json.dumps(CHAT).encode(), json.dumps({"question": "x", "label": "1"}).encode()
    count = 40 * FIRST_ROWS
    [said] = found("--prompt-data", prompts(*[good] * count, *[bad] * count)).errors
    line = int(said.split(" line ")[1].split(":")[0])
    assert count < line <= count + 2 * count * len(good) // (OTHER_ROWS * len(bad)) + 2
    assert "there is no column --input-key prompt; the row has label, question" in said
    assert found("--prompt-data", f"{prompts(*[good] * count, bad)}@[:{count}]").errors == []


def test_messages_need_the_template_where_engines_get_them(found, flags, prompts):
    plain = [word for word in flags if word != "--apply-chat-template"]
    assert len(plain) == len(flags) - 1
    flags[:], kept = plain, list(flags)
    try:
        [said] = found().errors
        assert said.endswith("holds chat messages, which engines do not take; add --apply-chat-template")
        own = "tests.unit.preflight.look.hooks.good"
        assert found("--custom-generate-function-path", "tests.unit.preflight.look.hooks.generate").errors == []
        assert found("--prompt-data", prompts({"prompt": "1+1=", "label": "2"}), "--custom-rm-path", own).errors == []
    finally:
        flags[:] = kept


def test_lengths(found, prompts):
    long = {**CHAT, "prompt": [{"role": "user", "content": "x" * 2000}]}
    path = prompts(CHAT, long, CHAT)
    [said] = found("--prompt-data", path).warnings
    assert "row 1: the prompt has 2008 tokens, and prompt and response together may have 1024; 1 of the first 3" in said
    [said] = found("--prompt-data", path, "--rollout-max-prompt-len", 500).warnings
    assert "of the first 3 prompts 1 are longer than --rollout-max-prompt-len 500 and are dropped" in said
    [said] = found("--prompt-data", path, "--sglang-context-length", 900).warnings
    assert "together may have 900" in said


def test_conversations_of_sft(flags, prompts):
    model = Path(flags[flags.index("--hf-checkpoint") + 1])

    def errors(*rows):
        findings = Findings()
        flags = [*sft_flags(model, prompts(*rows)), "--input-key", "prompt", "--num-rollout", "1"]
        look(parse_args(flags), False, findings)
        return findings.errors

    answered = [*CHAT["prompt"], {"role": "assistant", "content": "2"}]
    assert errors({"prompt": answered}) == []
    assert "row 0 trains no token: it has no assistant message" in errors(CHAT)[0]
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}]}
    [said] = errors({"prompt": answered}, {"prompt": answered}, {"prompt": [picture, answered[-1]]})
    assert "row 2: MediaError: the conversation holds a part of type 'image_url'" in said
    assert "row 0: supervised fine-tuning needs chat messages as prompt, got a string" in errors({"prompt": "1+1=2"})[0]


def test_conversations_of_sft_with_images(tmp_path, prompts):
    model = make_vision_checkpoint(tmp_path / "model", "qwen3_vl")
    picture = encode_image_for_rollout_engine(drawing(1))
    asked = [{"role": "user", "content": "<image>what?"}, {"role": "assistant", "content": "a line"}]

    def errors(*rows):
        findings = Findings()
        flags = [*sft_flags(model, prompts(*rows)), "--input-key", "prompt", "--num-rollout", "1"]
        look(parse_args([*flags, "--multimodal-keys", '{"image": "images"}']), False, findings)
        return findings.errors

    shown = {"prompt": asked, "images": [picture]}
    assert errors(shown, {"prompt": [{"role": "user", "content": "what?"}, asked[-1]]}, shown) == []
    assert "row 1 trains no token: it has no assistant message" in errors(shown, {**shown, "prompt": asked[:1]})[0]


def test_an_evaluation_has_columns_of_its_own(found, prompts):
    evaluation = ["--eval-interval", 1, "--eval-prompt-data", "aime", prompts(CHAT), "--eval-input-key", "problem"]
    [said] = found(*evaluation).errors
    assert said.startswith("--eval-prompt-data aime ")
    assert said.endswith("there is no column --eval-input-key problem; the row has label, prompt")
    assert found(*evaluation, "--debug-train-only", "--load-debug-rollout-data", "d/{rollout_id}.pt").errors == []


def test_only_a_dry_run_may_do_without_tokenizer_and_files():
    for dry_run in (True, False):
        findings = Findings()
        look_at_data(dry("--hf-checkpoint", "/no/such/model"), dry_run, findings)
        assert [len(findings.errors), len(findings.unchecked)] == [not dry_run, dry_run]
        assert "no tokenizer could be loaded from" in [*findings.errors, *findings.unchecked][0]
    findings = Findings()
    assert look_at_data(dry("--prompt-data", "/no/such/prompts.jsonl"), True, findings) == {}
    assert findings == Findings()  # said by the rules already


@pytest.mark.parametrize(
    ("path", "first"),
    [
        ("a.jsonl", "a.jsonl@[0:64]"),
        ("a.jsonl@[:10]", "a.jsonl@[0:10]"),
        ("a.jsonl@[100:]", "a.jsonl@[100:164]"),
        ("a.jsonl@[100:1000]", "a.jsonl@[100:164]"),
        ("a.jsonl@[-5:]", "a.jsonl@[-5:]"),
    ],
)
def test_thefirst_rows_of_a_slice_are_a_slice(path, first):
    assert first_rows(path) == first


def messages(*turns: str) -> dict[str, Any]:
    roles = ("user", "assistant") * 2
    return {"prompt": [{"role": r, "content": c} for r, c in zip(roles, turns, strict=False)], "label": "3"}


@pytest.mark.parametrize(
    ("rows", "warning"),
    [
        (
            [messages(f"{n}+1=") for n in range(3)],
            "has 3 prompts and --rollout-batch-size is 8: a rollout has",
        ),
        ([messages("1+1=")] * 20, "of the first 8 prompts 7 repeat an earlier one"),
        ([messages(f"{n}+1=", "2") for n in range(20)], "8 of the first 8 prompts end with a message of the assistant"),
    ],
)
def test_prompts_that_a_rollout_meets_twice_or_that_hold_the_answer(found, prompts, rows, warning):
    flags = ("--rollout-batch-size", 8, "--global-batch-size", 32)
    assert any(warning in text for text in found("--prompt-data", prompts(*rows), *flags).warnings)
    good = prompts(*(messages(f"{n}+1=") for n in range(20)))
    assert not [text for text in found("--prompt-data", good, *flags).warnings if "prompts" in text]


ENVIRONMENT = [
    "--environment-path", "tests.support.environments.Guess",
    "--custom-generate-function-path", "slime.rollout.environments.generate",
]  # fmt: skip


def test_rows_for_environments_need_no_prompt(found, prompts):
    rows = [{"label": "1", "metadata": {"difficulty": 2, "seed": n}} for n in range(4)]
    flags = ["--eval-interval", 1, "--eval-prompt-data", "e", prompts(*rows), "--eval-input-key", "prompt"]
    findings = found(*flags, *ENVIRONMENT)
    assert [text for text in findings.errors + findings.warnings if "prompt" in text] == []
    assert any("there is no column --eval-input-key prompt" in text for text in found(*flags).errors)

"""Hooks that cannot be imported or called, and rewards that are tried on a made-up answer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slime.preflight.look import hooks as first_look
from tests.unit.preflight.look import hooks

HERE = "tests.unit.preflight.look.hooks"
FILE = str(Path(hooks.__file__))


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Return a function that makes an importable module of some text; no test finds that of another."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(name: str, text: str) -> Path:
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / f"{name}.py").write_text(text)
        return tmp_path / f"{name}.py"

    return make


def test_every_mistake_is_reported_at_once(found):
    said = found(
        "--custom-rm-path", f"{HERE}.god", "--rollout-sample-filter-path", f"{HERE}.one_argument",
        "--loss-type", "custom_loss", "--custom-loss-function-path", f"{HERE}.los",
    ).errors  # fmt: skip
    of = {text.split()[0]: text for text in said}
    assert len(said) == len(of) == 3
    assert of["--custom-rm-path"].endswith("did you mean tests.unit.preflight.look.hooks.good?")
    assert (
        "cannot be called as the flag's function is: too many positional arguments. Expected fn(args, groups)"
        in of["--rollout-sample-filter-path"]
    )
    assert "--custom-loss-function-path" in of


def test_the_line_of_a_module_that_fails(found, module):
    path = module("first_look_undefined", "a = 1\nb = c\n")
    [said] = found("--custom-rm-path", "first_look_undefined.f").errors
    assert said.endswith(f"raised NameError: name 'c' is not defined (at {path}:2: b = c)")
    path = module("first_look_syntax", "def f(args, sample):\n    return sample.x = 1\n")
    [said] = found("--custom-rm-path", "first_look_syntax.f").errors
    assert said.endswith(f"(at {path}:2: return sample.x = 1)")
    path = module("first_look_exit", "raise SystemExit(4)\n")
    [said] = found("--custom-rm-path", "first_look_exit.f").errors
    assert "called exit(4)" in said


def test_a_dry_run_may_do_without_the_packages_of_the_cluster(found, module):
    module("first_look_absent", "import flash_attn.no_such_module\n")
    words = ["--custom-rm-path", "first_look_absent.f"]
    planned = found(*words, dry_run=True)
    assert (planned.errors, len(planned.unchecked)) == ([], 1)
    assert "No module named 'flash_attn'" in found(*words).errors[0]


def test_hooks_of_generation_are_not_needed_to_replay(found):
    words = ["--custom-rm-path", "no.such_function", "--debug-train-only"]
    assert found(*words, "--load-debug-rollout-data", "d/{rollout_id}.pt").errors == []


@pytest.mark.parametrize("name", ["good", "good_numpy"])
def test_a_sound_reward(name, found):
    findings = found("--custom-rm-path", f"{HERE}.{name}")
    assert (findings.errors, [w for w in findings.warnings if "has no effect" not in w]) == ([], [])


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("nothing", "returned nothing (None); a finite number is expected"),
        ("text", "returned str '1.0'; a finite number is expected"),
        ("not_finite", "returned float nan; a finite number is expected"),
        ("entry", "returned dict {'score': 1.0}; --reward-key must say which of its entries is the reward"),
        ("entry --reward-key points", "which has no entry --reward-key points"),
        ("good --reward-key score", "with --reward-key score a dict is expected"),
        ("good --group-rm", "AttributeError"),
    ],
)
def test_what_is_no_reward(name, error, found):
    path, *flags = name.split()
    findings = found("--custom-rm-path", f"{HERE}.{path}", *flags)
    said = findings.errors if "AttributeError" not in error else findings.warnings
    assert [sentence for sentence in said if error in sentence]
    assert FILE in said[0]


@pytest.mark.parametrize("words", ["entry --reward-key score", "group --group-rm"])
def test_other_forms_of_rewards(words, found):
    path, *flags = words.split()
    assert found("--custom-rm-path", f"{HERE}.{path}", *flags).errors == []


def test_what_a_later_hook_makes_a_reward_of_is_none_of_our_business(found):
    words = ["--custom-rm-path", f"{HERE}.text", "--custom-reward-post-process-path", f"{HERE}.good"]
    assert found(*words).errors == []


def test_a_reward_of_what_another_hook_leaves_in_the_sample_only_warns(found):
    words = ["--custom-rm-path", f"{HERE}.nothing", "--custom-generate-function-path", f"{HERE}.generate"]
    findings = found(*words)
    assert findings.errors == []
    assert "returned nothing (None)" in findings.warnings[0]


def test_a_reward_that_raises_warns_with_its_line(found):
    findings = found("--custom-rm-path", f"{HERE}.raising")
    assert findings.errors == []
    [said] = findings.warnings
    line = (
        Path(FILE)
        .read_text()
        .splitlines()
        .index('    return float(sample.response.split("<answer>")[1])  # IndexError')
        + 1
    )
    assert "raised IndexError: list index out of range" in said
    assert f"(at {FILE}:{line}: return float(" in said


@pytest.mark.parametrize("name", ["hanging", "blocking"])
def test_a_reward_that_hangs_is_not_waited_for(name, found, monkeypatch):
    monkeypatch.setattr(first_look, "DEADLINE_S", 0.2)
    [said] = found("--custom-rm-path", f"{HERE}.{name}").warnings
    assert "has not scored a made-up answer within 0 s" in said


def test_rules_need_labels(found, flags, prompts):
    path = prompts({"prompt": [{"role": "user", "content": "1+1="}]})
    place = flags.index("--label-key")
    kept, flags[:] = list(flags), [*flags[:place], *flags[place + 2 :]]
    try:
        [said] = found("--prompt-data", path).errors
        assert "--rm-type math compares answers with labels, and this row has none" in said
        assert found("--prompt-data", path, "--rm-type", "random").errors == []
        own = ["--custom-generate-function-path", f"{HERE}.generate"]
        assert found("--prompt-data", path, *own).errors == []  # which may set them
    finally:
        flags[:] = kept

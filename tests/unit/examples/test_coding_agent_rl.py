"""Tasks in local sandboxes, from the model's answer to the grade, with masks and rewards; graders and failures."""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from examples.coding_agent_rl import generate as module
from examples.coding_agent_rl import swe
from examples.coding_agent_rl.make_data import OPERATORS, READ, make_data, metadata, tasks
from examples.coding_agent_rl.operator_agent import OperatorHarness
from slime.agent.adapters import OpenAIAdapter
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.agent.sandbox import LocalSandbox
from slime.utils.types import Sample
from tests.support.agents import ToolTokenizer
from tests.support.episodes import player, trained

REPO = "/workspace/repo"
TASK = metadata(12, 5, "+", "-")


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    monkeypatch.setattr(module, "CONFIG", replace(module.CONFIG, adapter_port=0))
    for name, value in {"SANDBOX": "local", "HARNESS_CLS": OperatorHarness, "ADAPTER_CLS": OpenAIAdapter}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "load_tokenizer", lambda *args, **kwargs: ToolTokenizer())
    monkeypatch.setattr(swe, "SWE_PROMPT", "{problem_statement}")
    handles = []

    def run_app(*args: Any, **kwargs: Any) -> Any:
        handles.append(run_app_in_thread(*args, **kwargs))
        return handles[-1]

    monkeypatch.setattr(module, "run_app_in_thread", run_app)
    with player(module.generate) as one:
        yield one
        for handle in handles:
            handle.stop()


def sample(**fields: Any) -> Sample:
    return Sample(index=4, group_index=2, prompt=[], metadata={**TASK, **fields})


def test_an_agent_is_rewarded_by_the_tests_of_the_repository(play):
    asked = []

    def model(turns: list[str]) -> str:
        asked.append(turns)
        return "?" if len(turns) == 2 else "+"

    [solved] = play(model, sample())
    assert asked == [["not 12-5", ""], ["not 12-5", "?", "12+5", ""]]
    assert solved.reward == 1.0
    assert solved.index == 4
    assert trained(solved).replace("\ue001", "") == "?+"
    assert solved.metadata["grading_solved"] is True
    assert (solved.metadata["instance_id"], solved.metadata["agent_exit_code"]) == ("12+5", 0)
    [unsolved] = play(lambda turns: "*", sample())
    assert unsolved.reward == 0.0
    assert unsolved.metadata["applied_cleanly"] is True
    evaluated = play(lambda turns: "+", sample(), evaluation=True)
    assert (evaluated.reward, evaluated.status, evaluated.loss_mask) == (1.0, Sample.Status.COMPLETED, [0])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"image": None}, "missing_image_or_workdir"),
        ({"eval_cmd": ""}, "unevaluatable:no_grader"),
        ({"pre_commands": "exit 3"}, "exception:RuntimeError"),
    ],
)
def test_what_is_not_the_models_fault_is_aborted_without_loss(play, fields, reason):
    lost = play(lambda turns: "+", sample(**fields))
    assert lost.metadata["abort_reason"] == reason
    assert (lost.status, lost.remove_sample, lost.reward) == (Sample.Status.ABORTED, True, 0.0)
    assert (lost.tokens, lost.loss_mask, lost.rollout_log_probs) == ([0, 0], [0], [0.0])
    assert play(lambda turns: "+", sample(**fields), evaluation=True).status == Sample.Status.COMPLETED


def graded(diff: str, **fields: Any) -> swe.EvalResult:
    async def grade() -> swe.EvalResult:
        async with LocalSandbox() as sb:
            return await swe.run_evaluation(sb, {**TASK, **fields}, diff, 30)

    return asyncio.run(grade())


FIX = "--- a/calc.py\n+++ b/calc.py\n@@ -1,2 +1,2 @@\n def f(a, b):\n-    return a - b\n+    return a + b\n"


def test_graders(tmp_path):
    assert graded(FIX) == swe.EvalResult(1.0, True)
    assert graded("") == swe.EvalResult(0.0, True)
    assert graded(FIX.replace("a - b", "a / b")) == swe.EvalResult(0.0, False)
    assert graded(FIX, eval_cmd=None, f2p_script="python3 check.py").reward == 1.0
    (tmp_path / "run").write_text('echo "$1"; python3 check.py && echo fixed')
    (tmp_path / "parse").write_text(
        "import json, sys\nlines = open(sys.argv[1]).read().split()\n"
        "json.dump({'tests': [{'name': n, 'status': 'PASSED'} for n in lines]}, open(sys.argv[3], 'w'))\n"
    )
    own = {"run_script_path": str(tmp_path / "run"), "parser_script_path": str(tmp_path / "parse"),
           "selected_test_files": ["a", "b"], "fail_to_pass": ["fixed"], "pass_to_pass": ["a,b"]}  # fmt: skip
    assert graded(FIX, swepro=own).reward == 1.0
    assert graded("", swepro=own).reward == 0.0


def test_the_change_leaves_out_what_is_ours():
    async def change() -> str:
        async with LocalSandbox() as sb:
            await swe.prepare_workspace(sb, TASK)
            await sb.exec(
                f"cd {REPO} && mkdir .harness && touch .harness/log && echo 1 > new.py && rm check.py", check=True
            )
            return await swe.git_diff(sb, REPO)

    diff = asyncio.run(change())
    assert "+++ b/new.py" in diff
    assert "--- a/check.py" in diff
    assert "harness" not in diff
    assert swe.STATEMENT not in diff


def test_the_fields_of_a_task():
    remote = {"image_url": "i", "workdir": "/w", "f2p_script": "s", "instance_id": "n"}
    found = swe.get_metadata(Sample(metadata={"remote_env_info": remote, "workdir": "/own"}))
    assert {name: found[name] for name in ("image", "workdir", "f2p_script", "instance_id")} == {
        "image": "i", "workdir": "/own", "f2p_script": "s", "instance_id": "n"
    }  # fmt: skip
    assert swe.evaluability_check(found) is None


def test_every_task_has_one_right_operator(tmp_path):
    for a, b, name in random.Random(0).sample(tasks(), 50):
        wanted = OPERATORS[name](a, b)
        assert [other for other, fn in OPERATORS.items() if fn(a, b) == wanted] == [name]
    make_data(tmp_path, seed=1, demonstrations=300)
    rows = {f.stem: [json.loads(line) for line in f.read_text().splitlines()] for f in tmp_path.glob("*.jsonl")}
    held_out = {row["metadata"]["instance_id"] for row in rows["tasks"]}
    assert not held_out & {row["metadata"]["instance_id"] for row in rows["train"]}
    read = [row["messages"] for row in rows["sft"] if len(row["messages"]) == 4]
    assert 30 < len(read) < 90
    for _, asks, told, repaired in read:
        assert asks["content"] == READ
        assert told["content"][2] == repaired["content"]
        assert told["content"] not in held_out


INSTANCE = {
    "instance_id": "own__calc-1", "repo": "own/calc", "version": "1.0", "workdir": REPO,
    "pre_commands": TASK["pre_commands"], "problem_statement": "wrong sum", "eval_type": "pass_and_fail",
    "log_parser": "parse_log_pytest", "FAIL_TO_PASS": '["check.py::sum"]', "PASS_TO_PASS": '["check.py::other"]',
    "image": "own/image",
    "eval_script": (
        "#!/bin/bash\nset -uxo pipefail\n: '>>>>> Start Test Output'\n"
        "python3 check.py && echo 'PASSED check.py::sum' || echo 'FAILED check.py::sum - wrong'\n"
        "echo 'PASSED check.py::other'\n: '>>>>> End Test Output'\n"
    ),
}  # fmt: skip


@pytest.fixture
def swebench(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package swebench, as far as it is called: the script of an instance, and a report from its log."""
    modules = {name: ModuleType(name) for name in ("swebench", "swebench.harness", "swebench.harness.grading",
                                                   "swebench.harness.utils")}  # fmt: skip

    def get_eval_report(spec: Any, prediction: dict[str, str], test_log_path: str, include_tests_status: bool) -> Any:
        log = Path(test_log_path).read_text()
        passed = set(re.findall(r"^PASSED (\S+)", log, re.MULTILINE))
        wanted = {*json.loads(spec.FAIL_TO_PASS), *json.loads(spec.PASS_TO_PASS)}
        ran = ">>>>> End Test Output" in log
        return {prediction["instance_id"]: {"resolved": wanted <= passed, "infra_failure": not ran}}

    modules["swebench.harness.grading"].get_eval_report = get_eval_report
    modules["swebench.harness.utils"].make_test_spec = lambda instance: SimpleNamespace(**instance)
    for name, made in modules.items():
        monkeypatch.setitem(sys.modules, name, made)


@pytest.mark.usefixtures("swebench")
def test_swe_bench_grades_by_the_tests_that_must_pass():
    assert graded(FIX, **INSTANCE) == swe.EvalResult(1.0, True)
    assert graded("", **INSTANCE) == swe.EvalResult(0.0, True)
    assert graded(FIX.replace("a - b", "a / b"), **INSTANCE) == swe.EvalResult(0.0, False)
    assert graded(FIX, **{**INSTANCE, "PASS_TO_PASS": '["check.py::gone"]'}) == swe.EvalResult(0.0, True)
    with pytest.raises(RuntimeError, match="the tests of own__calc-1 could not run"):
        graded(FIX, **{**INSTANCE, "eval_script": "exit 1"})


@pytest.mark.usefixtures("swebench")
def test_an_instance_of_swe_bench_says_where_it_is():
    given = {name: value for name, value in INSTANCE.items() if name not in ("image", "workdir")}
    found = swe.get_metadata(Sample(metadata={"remote_env_info": given}))
    assert found["image"] == "swebench/sweb.eval.x86_64.own_1776_calc-1:latest"
    assert (found["workdir"], found["FAIL_TO_PASS"]) == ("/testbed", '["check.py::sum"]')
    assert swe.evaluability_check(found) is None
    assert swe.get_metadata(Sample(metadata={"remote_env_info": INSTANCE}))["image"] == "own/image"


def test_swe_bench_without_its_package_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "swebench", ModuleType("swebench"))
    for name in ("swebench.harness", "swebench.harness.grading"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ModuleNotFoundError, match="pip install swebench"):
        swe.evaluability_check(swe.get_metadata(Sample(metadata=INSTANCE)))

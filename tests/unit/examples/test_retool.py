"""The interpreter's limits, and masks and rewards of episodes with it."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from examples.retool.environment import code_in, score
from examples.retool.interpreter import LONGEST_OUTPUT, close_workers, interpret
from examples.retool.make_data import make_data
from slime.rollout.environments import ToolError
from slime.rollout.rm_hub.failure import RewardFailure
from slime.utils.types import Sample
from tests.support.episodes import player, trained

PROMPT = [{"role": "user", "content": "47*50*60"}]


@pytest.fixture(scope="module", autouse=True)
def workers():
    yield
    close_workers()


@pytest.mark.parametrize(
    ("code", "seen"),
    [
        ("47*50*60", ("141000", False)),
        ("x = 2\nprint(x)\nx + 1", ("2\n3", False)),
        ("import math\nmath.factorial(5)", ("120", False)),
        ("", ("", False)),
        ("1/0", ("ZeroDivisionError: division by zero", True)),
        ("print('a')\n(", ("SyntaxError: '(' was never closed (<code>, line 2)", True)),
        ("exit()", ("NameError: name 'exit' is not defined", True)),
        ("raise SystemExit(3)", ("SystemExit: 3", True)),
        ("open('/etc/passwd')", ("NameError: name 'open' is not defined", True)),
    ],
)
async def test_what_the_model_sees_of_code(code, seen):
    assert await interpret(code, cpu_s=2, memory_bytes=1 << 30) == seen


@pytest.mark.slow
async def test_code_that_goes_too_far_is_answered_and_the_loop_goes_on():
    """Endless loops, floods of output, memory, processes and modules: each is an error, and nothing waits for it."""
    slow = []

    async def watch() -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.01)
            slow.append(time.monotonic() - began)

    watching = asyncio.create_task(watch())
    limits = {"cpu_s": 1.0, "memory_bytes": 1 << 30}
    text, failed = await interpret("while True: pass", **limits)
    assert (text, failed) == ("timeout: the code took more than 1 s of computing", True)
    text, failed = await interpret("while True: print('x' * 1000)", **limits)
    assert failed
    assert text.startswith("x" * 1000)
    assert len(text) < LONGEST_OUTPUT + 100
    assert text.endswith(f"OverflowError: more than {LONGEST_OUTPUT} characters of output")
    text, failed = await interpret("len(bytearray(2 << 30))", **limits)
    assert (text, failed) == ("MemoryError: ", True)
    text, failed = await interpret("import os\nos.fork()", **limits)
    assert failed
    assert text.startswith("ImportError: 'os' is not available")
    watching.cancel()
    assert sorted(slow)[len(slow) // 2] < 0.1


async def test_a_worker_that_crashes_is_no_mistake_of_the_model(monkeypatch):
    from examples.retool import interpreter

    class Crashed:
        async def call(self, *arguments: str) -> None:
            raise RewardFailure("crashed", "ended")

    monkeypatch.setattr(interpreter, "_workers", lambda *limits: Crashed())
    with pytest.raises(RewardFailure, match="ended"):
        await interpret("1")


CALL = '<tool_call>{"name": "code_interpreter", "arguments": {"code": "1"}}</tool_call>'


@pytest.mark.parametrize(
    ("action", "code"),
    [
        (r"Answer: \boxed{3} <code>2</code>", None),
        (f"<code>2</code>{CALL}", "1"),
        ("a <code>\n2\n</code> ```python\n3\n```", "2"),
        ("```python\n3\n```", "3"),
        ("```text\n3\n```", None),
        ("thinking", None),
        ('<tool_call>{"name": "other"}</tool_call>', "error"),
        ("<tool_call>code</tool_call>", "error"),
    ],
)
def test_which_code_a_turn_runs(action, code):
    found = code_in(action)
    assert ("error" if isinstance(found, ToolError) else found) == code


@pytest.mark.parametrize(
    ("text", "calls", "expected"),
    [
        (r"Answer: \boxed{141000}", 0, 1.0),
        (r"Answer: \boxed{141000}<|im_end|>", 3, 1.0),
        (r"Answer: \boxed{7}", 0, -1.1),
        ("Answer: 141000", 2, -1.0),  # not in a box
        (r"Answer: \boxed{7}", 6, -0.8),
        (r"Answer: \boxed{7}", 10, -0.6),
        (r"Answer: \boxed{7}", 16, -0.6),
    ],
)
def test_the_published_reward(text, calls, expected):
    """-1 + (calls - 2) / 2 * 0.1 for a wrong answer, at most -0.6."""
    assert score(text, "141000", calls) == pytest.approx(expected)


def sample() -> Sample:
    return Sample(index=0, prompt=PROMPT, label="141000")


def asks_the_interpreter(turns: list[str]) -> str:
    if "<interpreter>" not in turns[-1]:
        return f"<code>{turns[1]}</code> and more"
    return "Answer: \\boxed{" + turns[-1].split("\n")[3] + "}"


def test_an_episode_with_a_call():
    with player(environment_config="examples/retool/small.yaml", rollout_stop=["</code>"]) as play:
        found = play(asks_the_interpreter, sample())
    result = "\n\n<interpreter>\n141000\n</interpreter>\n\n"
    code, answer = "<code>47*50*60</code>", "Answer: \\boxed{141000}\ue001"
    assert found.response == code + result + answer
    assert trained(found) == code + answer
    assert found.loss_mask == [1] * len(code) + [0] * len(result) + [1] * len(answer)
    assert found.reward == 1.0
    assert found.environment_episode["tool_calls"] == 1


def test_an_episode_that_is_cut_or_guesses_is_wrong():
    with player(environment_config="examples/retool/small.yaml", rollout_stop=["</code>"]) as play:
        assert play(lambda turns: "Answer: \\boxed{141001}", sample()).reward == 0.0
        cut = play(lambda turns: "<code>1/0</code>", sample())
    assert cut.status == Sample.Status.TRUNCATED
    assert cut.reward == 0.0
    assert cut.response.count("<interpreter>\nZeroDivisionError: division by zero\n</interpreter>") == 2
    assert "no calls are left" in cut.response
    assert cut.environment_episode["tool_errors"] == 4
    with player(environment_config="examples/retool/retool.yaml", rollout_max_response_len=9) as play:
        assert play(lambda turns: "thinking!", sample()).reward == pytest.approx(-1.1)


@pytest.mark.slow
def test_the_data(tmp_path):
    make_data(tmp_path, seed=1, demonstrations=2000)
    rows = {f.stem: [json.loads(line) for line in f.read_text().splitlines()] for f in tmp_path.glob("*.jsonl")}
    questions = {name: [row["messages"][0]["content"] for row in group] for name, group in rows.items()}
    assert not set(questions["products"]) & (set(questions["train"]) | set(questions["sft"]))
    assert not set(questions["train"][:20_000]) & set(questions["sft"])
    for row in rows["products"]:
        a, b, c = map(int, row["messages"][0]["content"].split("*"))
        assert row["label"] == str(a * b * c)
        assert len(row["label"]) == 6
    with_code = sum("<code>" in row["messages"][1]["content"] for row in rows["sft"])
    assert abs(with_code - 600) < 4 * (2000 * 0.3 * 0.7) ** 0.5

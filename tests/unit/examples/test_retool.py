"""The interpreter's limits, and masks and rewards of episodes with it."""

from __future__ import annotations

import asyncio
import json
import platform
import time
from pathlib import Path

import pytest

from examples.retool import interpreter
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
async def test_code_that_goes_too_far_is_answered_and_the_loop_continues():
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


LIMITS = {"cpu_s": 2.0, "memory_bytes": 1 << 30}


@pytest.mark.parametrize(
    ("first", "then", "seen"),
    [
        ("import math\nmath.factorial = lambda n: 7", "import math\nmath.factorial(5)", "120"),
        (
            "import decimal\ndecimal.getcontext().prec = 2",
            "import decimal\nprint(decimal.Decimal(1) / decimal.Decimal(8))",
            "0.125",
        ),
        (
            "import collections\ncollections.OrderedDict.__len__ = lambda s: 9",
            "import collections\nlen(collections.OrderedDict())",
            "0",
        ),
        (
            "import statistics\nstatistics.mean = sum",
            "import statistics\nstatistics.mean([1, 3])",
            "2",
        ),
        ("import random\nrandom._os.environ['A'] = 'b'", "import random\nrandom._os.environ.get('A')", ""),
        ("kept = 3", "kept", "NameError: name 'kept' is not defined"),
    ],
)
async def test_nothing_that_code_changes_is_there_for_other_code(first, then, seen):
    await interpret(first, **LIMITS)
    assert (await interpret(then, **LIMITS))[0] == seen


async def test_two_pieces_of_code_draw_different_numbers_whatever_the_first_one_seeds():
    await interpret("import random\nrandom.seed(1)", **LIMITS)
    draw = "import random\nrandom.seed()\nrandom.random()"
    assert (await interpret(draw, **LIMITS)) != (await interpret(draw, **LIMITS))


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="system calls are filtered on these")
@pytest.mark.parametrize(
    "code",
    [
        "os.open('/etc/passwd', 0)",
        "os.open('/tmp/slime-left-behind', os.O_CREAT | os.O_WRONLY)",
        "os.listdir('/')",
        "os.stat('/etc/passwd')",
        "os.readlink('/proc/self/exe')",
        "os.kill(1, 0)",
        "os.kill(os.getppid(), 9)",
        "os.fork()",
        "os.execv('/bin/sh', ['sh'])",
        "os.pipe()",
        "os.setuid(0)",
        "os.nice(-1)",
        "os.sched_setaffinity(0, [0])",
        "os.memfd_create('x')",
    ],
)
async def test_code_that_gets_hold_of_the_operating_system_gets_nothing_from_it(code):
    text, failed = await interpret(f"import random\nos = random._os\n{code}", **LIMITS)
    assert (text[:16], failed) == ("PermissionError:", True)


async def test_code_sees_no_environment(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret-of-the-run")
    close_workers()  # those that start now have inherited it, if any has
    assert await interpret("import random\ndict(random._os.environ)", **LIMITS) == ("{}", False)
    seen = await interpret("import random\nrandom._os.open('/proc/self/environ', 0)", **LIMITS)
    assert seen[0].startswith("PermissionError")
    pool = interpreter._workers(*LIMITS.values())
    for pid in pool.pids():
        assert b"secret-of-the-run" not in Path(f"/proc/{pid}/environ").read_bytes()


async def test_code_that_ends_its_process_is_answered_and_costs_nothing_else():
    pids = interpreter._workers(*LIMITS.values()).pids()
    assert await interpret("import random\nrandom._os._exit(0)", **LIMITS) == (
        "SystemExit: the code ended the interpreter",
        True,
    )
    assert await interpret("import random\n[random._os.write(fd, b'[]') for fd in (3, 4, 5, 6, 7)]", **LIMITS)
    assert await interpret("1 + 1", **LIMITS) == ("2", False)
    assert interpreter._workers(*LIMITS.values()).pids() == pids


@pytest.mark.parametrize(
    ("code", "seen"),
    [
        ("import datetime\nprint(datetime.datetime.strptime('2020-02-03', '%Y-%m-%d'))", "2020-02-03 00:00:00"),
        ("'\u00e4'.encode('latin-1')", r"b'\xe4'"),
        ("import statistics\nstatistics.NormalDist(0, 1).cdf(0)", "0.5"),
        ("import functools\nfunctools.singledispatch(lambda x: 3)(1)", "3"),
        ("import collections.abc\nissubclass(list, collections.abc.Sequence)", "True"),
    ],
)
async def test_what_modules_load_when_they_are_used_is_there(code, seen):
    assert await interpret(code, **LIMITS) == (seen, False)


async def test_a_worker_that_crashes_is_no_mistake_of_the_model(monkeypatch):
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

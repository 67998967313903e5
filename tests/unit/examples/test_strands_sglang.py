"""Executions of the agent: masks, log-probs, rewards, limits and failures; with the real packages where they are."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from examples.retool.interpreter import close_workers
from examples.strands_sglang.make_data import call, demonstration, make_data
from slime.utils.types import Sample
from tests.support.agents import BEGIN, END, ToolTokenizer
from tests.support.episodes import player, trained
from tests.support.strands_stub import ensure_strands

ensure_strands()

from examples.strands_sglang import generate as module  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
SMALL = {"strands": {"max_tool_iters": 2, "cpu_s": 2, "memory_gib": 1, "binary": True}}


class Tokenizer(ToolTokenizer):
    """With a template that knows what that of Qwen3 knows, and a line break after each message."""

    def apply_chat_template(self, messages: list[dict], *, enable_thinking: bool = True, **options: Any) -> Any:
        text = super().apply_chat_template(messages, **options)
        return text.replace(f"{END}{BEGIN}", f"{END}\n{BEGIN}") + ("\n" if text.endswith(END) else "")


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch):
    monkeypatch.setattr(module, "GenerateState", lambda args: SimpleNamespace(tokenizer=Tokenizer()))
    yield
    close_workers()


def play(model: Any, custom: Any = SMALL, **flags: Any) -> Sample:
    sample = Sample(index=4, group_index=1, prompt=[{"role": "user", "content": "6*7"}], label="42")
    engines = {"sglang_server_concurrency": 4, "rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 1}
    with player(module.generate, custom, **engines, **flags) as one:
        return one(model, sample)


def multiply(turns: list[str]) -> str:
    """Call the interpreter, then answer with the number that the last message of a tool has."""
    found = [text for text in (turn.strip(f"{END}\n") for turn in turns[:-1]) if text.isdecimal()]
    return f"Answer: \\boxed{{{found[-1]}}}" if found else call("6*7")


async def reward(sample: Sample, custom: Any = SMALL) -> float:
    return await module.reward_func(SimpleNamespace(**custom), sample)


async def test_only_what_the_model_wrote_is_trained_on():
    sample = play(multiply)
    answer = r"Answer: \boxed{42}"
    assert trained(sample) == call("6*7") + END + answer + END
    assert sample.response == f"{call('6*7')}{END}\n{BEGIN}tool\n42{END}\n{BEGIN}assistant\n{answer}{END}"
    assert len(sample.tokens) - sample.response_length == sample.tokens.index(ord("<"))
    assert [p for p, mask in zip(sample.rollout_log_probs, sample.loss_mask, strict=True) if mask] == pytest.approx(
        [-0.5 - ord(c) / 1000 for c in trained(sample)]
    )
    assert {p for p, mask in zip(sample.rollout_log_probs, sample.loss_mask, strict=True) if not mask} == {0.0}
    assert (sample.status, sample.weight_versions, sample.metadata["tool_iters"]) == (
        Sample.Status.COMPLETED, ["0", "0"], 1,
    )  # fmt: skip
    assert await reward(sample) == 1.0


async def test_what_the_model_does_wrong_is_no_failure():
    sample = play(lambda turns: r"Answer: \boxed{41}")
    assert (await reward(sample), await reward(sample, {})) == (0.0, -1.1)
    odd = ['<tool_call>{"name": "code_interpreter"</tool_call>', "no"]
    sample = play(lambda turns: odd[len(turns) // 2 - 1])
    assert (sample.status, await reward(sample)) == (Sample.Status.COMPLETED, 0.0)
    assert trained(sample) == odd[0] + END + odd[1] + END


def test_limits():
    sample = play(lambda turns: call("1"))
    assert (sample.status, trained(sample)) == (Sample.Status.TRUNCATED, 2 * (call("1") + END))
    assert sample.metadata["tool_iters"] == 2
    sample = play(multiply, rollout_max_response_len=len(call("6*7") + END))
    assert (sample.status, trained(sample)) == (Sample.Status.TRUNCATED, call("6*7") + END)
    sample = play(multiply, rollout_max_response_len=20)
    assert sample.status == Sample.Status.TRUNCATED


@pytest.mark.parametrize("failing", ["interpret", "generate"])
def test_what_is_not_the_models_fault_is_aborted(failing, monkeypatch):
    async def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("gone")

    if failing == "interpret":
        monkeypatch.setattr(module, "interpret", fail)
    else:
        monkeypatch.setattr(module.RecordingClient, "generate", fail)
    sample = play(multiply)
    assert (sample.status, sample.reward) == (Sample.Status.ABORTED, None)
    assert sample.metadata["abort_reason"] == "strands: RuntimeError('gone')"


def test_an_abort_of_the_engine():
    async def generate(**request: Any) -> Any:
        return {"meta_info": {"finish_reason": {"type": "abort"}}}

    client = module.RecordingClient(SimpleNamespace(generate=generate), 4)
    with pytest.raises(module.Interrupted):
        client.generate([1], sampling_params={}).send(None)


def test_prompts():
    settings = module.Settings(system_prompt="own")
    chat = [{"role": "system", "content": "given"}, {"role": "user", "content": "q"}]
    assert module.prompt_of(Sample(prompt="q"), settings) == ("own", "q")
    assert module.prompt_of(Sample(prompt=chat), settings) == ("given", "q")
    assert module.prompt_of(Sample(prompt=chat[1:]), settings) == ("own", "q")


def test_without_the_packages_the_error_says_what_to_install():
    code = "import sys; sys.modules['strands'] = None; import examples.strands_sglang.run as r; r.require_packages()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "pip install strands-agents==1.62.0 strands-sglang==0.4.3" in done.stderr


def test_the_data(tmp_path):
    make_data(tmp_path, seed=1, demonstrations=100)
    assert sum("tool_call" in line for line in (tmp_path / "sft.jsonl").open()) in range(15, 50)
    chat = demonstration((50, 60, 70), random.Random(1))
    assert [one["content"] for one in chat] == ["50*60*70", call("50*60*70"), "210000", r"Answer: \boxed{210000}"]

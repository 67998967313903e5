"""Conversations with the shop's customer, their masks and rewards; tau2-bench's domains behind their interface."""

from __future__ import annotations

import itertools
import json
import random
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import yaml

from examples.tau_bench import tau2_world
from examples.tau_bench.make_data import demonstration, make_data
from examples.tau_bench.make_tasks import make_tasks
from examples.tau_bench.shop import STATUSES, Shop, right_turn
from examples.tool_orchestra.tau2_domain import Tau2Domain
from slime.rollout.environments import Task
from slime.utils.types import Sample
from tests.support.agents import END
from tests.support.episodes import player, trained

CONFIG = "examples/tau_bench/small.yaml"


@pytest.fixture
def play():
    with player(environment_config=CONFIG) as found:
        yield found


def wish(status: str, tells: bool = True) -> Sample:
    about = {"order": "k7", "color": "red", "status": status, "tells": tells}
    return Sample(index=0, group_index=0, metadata=about)


def careful(turns: list[str]) -> str:
    """Keep the policy."""
    order, _, color = turns[0].partition(" ")
    if len(turns) == 2:
        return f"get {order}"
    if turns[2] == "new" and not (color := color or "".join(turns[4:5])):
        return "color?"
    return right_turn(turns[2], order, color)


@pytest.mark.parametrize(("status", "tells"), list(itertools.product(STATUSES, (True, False))))
def test_the_policy_is_rewarded(play, status, tells):
    found = play(careful, wish(status, tells))
    assert (found.reward, found.status) == (1.0, Sample.Status.COMPLETED)
    asked = "color?" + END if status == "new" and not tells else ""
    assert trained(found) == f"get k7{END}{asked}{right_turn(status, 'k7', 'red')}{END}"
    assert found.environment_episode["tool_calls"] == 1 + (status in ("new", "lost"))


@pytest.mark.parametrize("status", STATUSES)
def test_one_of_four_guesses_is_right(play, status):
    rewards = [play(lambda turns, one=one: right_turn(one, "k7", "red"), wish(status)).reward for one in STATUSES]
    assert rewards == [float(one == status) for one in STATUSES]


def test_wrong_changes_and_turns_that_lead_nowhere(play):
    assert play(lambda turns: "set k7 blue", wish("new")).reward == 0.0
    lost = play(lambda turns: "hello", wish("new"))
    assert (lost.reward, lost.status) == (0.0, Sample.Status.TRUNCATED)
    assert lost.response.count("?") == 3
    wrong = play(lambda turns: ["set k7", "get b2", "<think>get k7</think>\nno"][len(turns) // 2 - 1], wish("sent"))
    assert wrong.reward == 1.0
    assert (wrong.environment_episode["tool_calls"], wrong.environment_episode["tool_errors"]) == (2, 2)
    assert "error: set takes 2" in wrong.response
    assert "none" in wrong.response


def test_the_data(tmp_path):
    make_data(tmp_path, seed=1, demonstrations=400)
    rows = {f.stem: [json.loads(line) for line in f.read_text().splitlines()] for f in tmp_path.glob("*.jsonl")}
    pairs = {
        name: {(row["metadata"]["order"], row["metadata"]["color"]) for row in rows[name]}
        for name in ("train", "orders", "questions")
    }
    assert pairs["orders"] == pairs["questions"]
    assert not pairs["orders"] & pairs["train"]
    assert len(rows["orders"]) == len(rows["questions"]) == 128
    for row in rows["train"][:50]:
        task = Task("shop", 0, 0, metadata=row["metadata"])
        assert row["messages"] == [{"role": "user", "content": Shop(SimpleNamespace(), task).open().customer}]
    assert 0.15 < sum(len(row["messages"]) > 2 for row in rows["sft"]) / 400 < 0.35
    shown = (demonstration(("k7", "red", "new", False), random.Random(seed)) for seed in range(99))
    assert [m["content"] for m in max(shown, key=len)] == ["k7", "get k7", "new", "color?", "red", "set k7 red"]


class Gym:
    """tau2-bench's environment for agents: one tool, a customer who says goodbye after the first message."""

    made: ClassVar[list[dict[str, Any]]] = []
    breaks = False

    def __init__(self, **options: Any) -> None:
        self.made.append(options)
        self.actions: list[str] = []
        options["env"] = self

    def _info(self, run: dict[str, Any]) -> dict[str, Any]:
        function = {"name": "find", "description": "Find.", "parameters": {"type": "object", "properties": {}}}
        tools = [SimpleNamespace(name=name, openai_schema={"function": {**function, "name": name}})
                 for name in ("find", "done")]  # fmt: skip
        return {"policy": "Be kind.", "tools": tools, "simulation_run": json.dumps(run)}

    def reset(self) -> tuple[str, dict[str, Any]]:
        return "user: Hello", self._info({})

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        if action.startswith("{") and json.loads(action)["name"] == "find":
            return "tool: Error: not found", 0.0, False, False, self._info({})
        return "user: Bye. ###STOP###", 1.0, True, False, self._info({} if self.breaks else {"id": "1"})


@pytest.fixture
def tau2(monkeypatch, tmp_path):
    gym = ModuleType("tau2.gym.gym_agent")
    gym.AgentGymEnv = Gym
    runs = ModuleType("tau2.run")
    runs.load_tasks = lambda domain, task_split_name=None: [SimpleNamespace(id=f"{domain}-{task_split_name}")]
    for name, module in {"tau2": ModuleType("tau2"), "tau2.gym": ModuleType("tau2.gym"), "tau2.gym.gym_agent": gym,
                         "tau2.run": runs}.items():  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(Gym, "made", [])
    options = {"world": "examples.tau_bench.tau2_world.Tau2World", "domain": "retail", "user_model": "user"}
    entry = {"path": "examples.tau_bench.environment.TauBench", "name": "retail", "options": options}
    path = tmp_path / "tau2.yaml"
    path.write_text(yaml.safe_dump({"environments": [entry]}))
    monkeypatch.setattr(tau2_world, "get_model_url", lambda args, name, endpoint: f"http://host/{name}{endpoint}")
    return str(path)


CALL = '<tool_call>{"name": "find", "arguments": {"a": 1}}</tool_call>'


def test_a_domain_of_tau2_bench(tau2):
    with player(environment_config=tau2) as play:
        said = iter([CALL, "<tool_call>{</tool_call>", "", "I am done."])
        found = play(lambda turns: next(said), Sample(index=0, metadata={"task_id": 3}))
    [options] = Gym.made
    assert options["env"].actions == ['{"name": "find", "arguments": {"a": 1}}', "I am done."]
    assert {name: options[name] for name in ("domain", "task_id", "max_steps", "user_llm")} == {
        "domain": "retail", "task_id": "3", "max_steps": 200, "user_llm": "openai/user"
    }  # fmt: skip
    assert options["user_llm_args"]["api_base"] == "http://host/user/v1"
    assert found.reward == 1.0
    assert [one["role"] for one in found.prompt] == ["system", "user"]
    assert [one["content"] for one in found.prompt] == ["Be kind.", "Hello"]
    assert (found.environment_episode["tool_calls"], found.environment_episode["tool_errors"]) == (2, 2)
    assert trained(found) == f"{CALL}{END}<tool_call>{{</tool_call>{END}{END}I am done.{END}"


def test_a_conversation_that_is_cut_is_ended_and_one_that_breaks_aborted(tau2, monkeypatch):
    with player(environment_config=tau2, rollout_max_response_len=len(CALL) + 5) as play:
        cut = play(lambda turns: CALL, Sample(index=0, metadata={"task_id": 3}))
        assert (cut.status, cut.reward) == (Sample.Status.TRUNCATED, 0.0)
        assert Gym.made[0]["env"].actions[-1] == '{"name": "done", "arguments": {}}'
        monkeypatch.setattr(Gym, "breaks", True)
        lost = play(lambda turns: "Bye", Sample(index=1, metadata={"task_id": 4}))
    assert lost.status == Sample.Status.ABORTED
    assert lost.metadata["abort_reason"] == "retail.step.RuntimeError"


async def test_a_domain_for_an_orchestrator(tau2):
    options = {"domain": "retail", "user_model": "user"}
    args = SimpleNamespace(tool_orchestra={"func_call_options": options})
    domain = Tau2Domain(args, Sample(index=0, metadata={"task_id": 3, "domain": "airline"}))
    assert await domain.reset() == "Be kind.\n\nThe user said:\nHello"
    assert [tool["function"]["name"] for tool in domain.tools] == ["find"]
    assert await domain.call("find", {"a": 1}) == "Error: not found"
    assert await domain.reward() == 0.0
    assert await domain.say("I am done.") is None
    assert await domain.reward() == 1.0
    await domain.close()
    [made] = Gym.made
    assert (made["domain"], made["task_id"]) == ("airline", "3")
    assert made["env"].actions == ['{"name": "find", "arguments": {"a": 1}}', "I am done."]


def test_the_tasks_of_a_domain(tau2, tmp_path):
    assert make_tasks(tmp_path / "new" / "tasks.jsonl", domain="retail", split="test") == 1
    row = json.loads((tmp_path / "new" / "tasks.jsonl").read_text())
    assert row == {"prompt": "", "metadata": {"task_id": "retail-test"}}
    make_tasks(tmp_path / "tasks.jsonl", domain="airline", split="test", category="func_call")
    row = json.loads((tmp_path / "tasks.jsonl").read_text())
    assert row["metadata"] == {"task_id": "airline-test", "category": "func_call", "domain": "airline"}


def test_the_package_of_another_name_is_distinguished(monkeypatch):
    monkeypatch.setitem(sys.modules, "tau2", ModuleType("tau2"))  # no package, as that of PyPI
    for name in ("tau2.gym", "tau2.gym.gym_agent"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ModuleNotFoundError, match="called tau2 on PyPI has nothing to do with it"):
        tau2_world.agent_gym()

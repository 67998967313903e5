"""Every example with a small version: two rollouts and an evaluation of its own command line, up to the trainer.

The rollout manager is the real one; stand-in engines answer right or wrong by a coin. What the small versions learn is
in tests/soak/test_environment_examples.py.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.adaptive_environments.run import EXAMPLE as ADAPTIVE
from examples.agentflow.run import EXAMPLE as AGENTFLOW
from examples.agentflow.small_world import plan_for
from examples.coding_agent_rl.make_data import OPERATORS, READ
from examples.coding_agent_rl.run import EXAMPLE as CODING
from examples.delta_weight_sync.run import EXAMPLE as DELTA
from examples.eval_multi_task.run import EXAMPLE as MULTI_TASK
from examples.memagent.run import EXAMPLE as MEMAGENT
from examples.multi_agent.run import EXAMPLE as MULTI_AGENT
from examples.openai_agents.make_data import call
from examples.openai_agents.run import EXAMPLE as OPENAI_AGENTS
from examples.quickstart.make_data import answer
from examples.quickstart.recipe import Paths
from examples.retool.interpreter import close_workers
from examples.retool.run import EXAMPLE as RETOOL
from examples.search_r1.run import EXAMPLE as SEARCH
from examples.small_run import SmallExample
from examples.strands_sglang.make_data import call as call_interpreter
from examples.strands_sglang.run import EXAMPLE as STRANDS
from examples.tau_bench.run import EXAMPLE as TAU_BENCH
from examples.tau_bench.shop import right_turn
from examples.tool_orchestra.make_data import call as call_model
from examples.tool_orchestra.run import EXAMPLE as TOOL_ORCHESTRA
from examples.tournament.run import EXAMPLE as TOURNAMENT
from slime.arguments import parse_args
from slime.rollout.base_types import call_rollout_fn
from slime.servers import http_utils
from slime.utils.async_utils import run
from slime.utils.misc import SingletonMeta, load_function
from slime.utils.processing_utils import load_tokenizer
from tests.support.arguments import CONFIG
from tests.support.rollout_manager import set_up, without_ray
from tests.support.standin import StandInCluster
from tests.support.standin import engine as standin
from tests.support.strands_stub import ensure_strands
from tools.script_runs import dry_runs
from tools.tiny_model import make_tokenizer

pytestmark = pytest.mark.integration
ROOT = Path(__file__).resolve().parents[2]
END = "<|im_end|>"
Oracle = Callable[[list[str]], str]


def add(turns: list[str]) -> str:
    return answer(*map(int, re.findall(r"\d+", turns[0])[:2]))


def adds_or_hunts(turns: list[str]) -> str:
    return add(turns) if "+" in turns[0] else f"{len(turns):02d}"


def choose(turns: list[str]) -> str:
    if "+" in turns[0]:
        return add(turns)
    return max(turns[0].split(), key=lambda word: word[1:])[0] if " " in turns[0] else turns[0].upper()


def one_of_several(turns: list[str]) -> str:
    return "Judgment: 1" if "?" in turns[0] else add(turns)


def compute(turns: list[str]) -> str:
    if "<interpreter>" in turns[-1]:
        return f"Answer: \\boxed{{{turns[-1].split(chr(10))[-4]}}}"
    return f"<code>{turns[0]}</code>"


def look_up(turns: list[str]) -> str:
    if "</information>" in turns[-1]:
        return f"<answer>{turns[-1].partition('</information>')[0].split()[-1]}</answer>"
    return f"<search>{turns[0]}</search>"


def serve(turns: list[str]) -> str:
    order, _, color = turns[0].partition(" ")
    if len(turns) == 2:
        return f"get {order}"
    if turns[2] == "new" and not (color := color or "".join(turns[4:5])):
        return "color?"
    return right_turn(turns[2], order, color) if turns[2] != "?" else "no"


def plan(turns: list[str]) -> str:
    query, *steps = turns[0].splitlines()
    tools = plan_for(query)
    return f"Tool Name: {tools[min(len(tools) - 1, sum('error' not in step for step in steps))]}"


def remember(turns: list[str]) -> str:
    asked, reads, section = turns[0].partition(":")
    memory = asked[1:] if len(asked) == 2 else "-"
    _, found, rest = section.partition(asked[0])
    return (rest[0] if found else memory) if reads else f"\\boxed{{{memory}}}"


def call_and_copy(turns: list[str]) -> str:
    return call(turns[0]) if len(turns) == 2 else turns[2].split()[-1]


def compute_with_a_call(turns: list[str]) -> str:
    return call_interpreter(turns[0]) if len(turns) == 2 else f"Answer: \\boxed{{{turns[2]}}}"


def ask_an_expert(turns: list[str]) -> str:
    """Of hard questions, those of every other place are put to the cheap expert without a search."""
    guesses = turns[0][-1] in "ae"
    return call_model("answer-1" if guesses or "Documents" in turns[0] or "easy" in turns[0] else "search-1")


def read_and_repair(turns: list[str]) -> str:
    if len(turns) == 2:
        return READ
    return next(name for name in OPERATORS if name in turns[2])


EXAMPLES: list[tuple[SmallExample, Oracle]] = [
    (ADAPTIVE, adds_or_hunts), (DELTA, add), (MULTI_AGENT, one_of_several), (MULTI_TASK, choose), (RETOOL, compute),
    (SEARCH, look_up), (TOURNAMENT, add), (TAU_BENCH, serve), (AGENTFLOW, plan), (MEMAGENT, remember),
    (OPENAI_AGENTS, call_and_copy), (TOOL_ORCHESTRA, ask_an_expert), (STRANDS, compute_with_a_call),
    (CODING, read_and_repair),
]  # fmt: skip
RIGHT = {"examples.memagent": 0.85}
"""The share of right answers, where it is not 0.7: up to 17 of MemAgent's in a row must be right."""
SIZES: dict[str, tuple[int, int]] = {"examples.coding_agent_rl": (2, 4)}
"""Prompts of a rollout and samples of each, and tasks of an evaluation, where they are not 4 and 16: every one of these
takes two sandboxes."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[StandInCluster]:
    with StandInCluster(1) as one:
        yield one
    close_workers()


def turns_of(text: str) -> list[str]:
    """Return what each message of a rendered conversation says; the last one is the model's, as far as it has got."""
    return [part.partition("\n")[2].partition(END)[0] for part in text.split("<|im_start|>")[1:]]


@pytest.mark.parametrize(("example", "oracle"), EXAMPLES, ids=[example.package[9:] for example, _ in EXAMPLES])
def test_two_rollouts_and_an_evaluation(example, oracle, cluster, tmp_path, monkeypatch):
    ensure_strands()
    for name in ("generate", "swe"):  # they read variables, which the service sets, when they are imported
        monkeypatch.delitem(sys.modules, f"examples.coding_agent_rl.{name}", raising=False)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(http_utils, "_http_client", None)
    without_ray(tmp_path, monkeypatch)
    SingletonMeta.clear_instances()
    paths = Paths(tmp_path, example.sft_rollouts)
    paths.sft_model.mkdir(parents=True)
    (paths.sft_model / "config.json").write_text(json.dumps(CONFIG))
    make_tokenizer(paths.sft_model)
    load_function(f"{example.package}.make_data.make_data")(paths.data, seed=1, demonstrations=10)
    size, tasks = SIZES.get(example.package, (4, 16))
    for file in paths.data.glob("*.jsonl"):
        if file.stem in ("train", *example.data_sets, *example.watched):
            file.write_text("".join(file.read_text().splitlines(keepends=True)[:tasks]))
    tokenizer, coin = load_tokenizer(str(paths.sft_model)), random.Random(1)
    share = RIGHT.get(example.package, 0.7)

    def reply(input_ids: list[int], params: dict[str, Any]) -> list[int]:
        said = oracle(turns_of(tokenizer.decode(input_ids))) if coin.random() < share else "0"
        stopped = said.endswith(tuple(params.get("stop") or ("\0",)))
        return list(tokenizer.encode(said + ("" if stopped else END)))

    monkeypatch.setattr(cluster.engines[0], "reply", reply)
    monkeypatch.setattr(standin, "_text", lambda tokens: tokenizer.decode(list(tokens)))
    words = example.grpo(paths, 0, rollouts=2, shuffled=False)
    for flag in ("--rollout-batch-size", "--n-samples-per-prompt"):
        words[words.index(flag) + 1] = str(size)
    words[words.index("--n-samples-per-eval-prompt") + 1] = "1"
    with example.service(paths) as more:
        args = parse_args([*words, *more])
        args.debug_train_only = True  # the manager starts no engines
        args.sglang_router_ip, args.sglang_router_port = cluster.host, cluster.port
        http_utils.init_http_client(args)
        manager = set_up(args)
        try:
            for rollout_id in range(2):
                trained = [box.inner.to_rollout_data() for box in manager.generate(rollout_id)]
                rewards = [reward for shard in trained for reward in shard["raw_reward"]]
                assert min(rewards) < max(rewards)
                for shard in trained:
                    for tokens, mask, length in zip(
                        shard["tokens"], shard["loss_masks"], shard["response_lengths"], strict=True
                    ):
                        assert len(mask) == length < len(tokens)
                        # turns of an orchestrator that are no call are out of the loss
                        assert sum(mask) > 0 or example is TOOL_ORCHESTRA
                    assert sum(map(sum, shard["loss_masks"])) > 0
            found = call_rollout_fn(
                load_function(args.eval_function_path), args, 0, manager.data_source, evaluation=True
            )
        finally:
            if example is CODING:
                load_function(f"{example.package}.generate.AdapterService")(args).handle.stop()
            run(http_utils._http_client.close())
            SingletonMeta.clear_instances()
    assert list(found.data) == [*example.data_sets, *example.watched]
    for result in found.data.values():
        assert 0 < sum(result["rewards"]) < len(result["rewards"])


def test_the_scripts_for_gpus_are_accepted(tmp_path):
    folder = ROOT / "examples"
    names = sorted(path.relative_to(folder).as_posix() for path in folder.glob("*/run*.sh"))
    assert len(names) >= 14
    env = {**os.environ, "BASE_DIR": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for one in dry_runs(names, scripts=folder, env=env, cwd=tmp_path).values():
        assert one.status == 0, one.name + one.err
        assert "has no effect" not in one.out + one.err, one.name
        assert "not available" not in one.out + one.err, one.name

"""The environments of the small versions of the examples, without the loop."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from examples.adaptive_environments.run import EXAMPLE as ADAPTIVE
from examples.agentflow.run import EXAMPLE as AGENTFLOW
from examples.coding_agent_rl.run import EXAMPLE as CODING
from examples.delta_weight_sync.run import EXAMPLE as DELTA
from examples.eval_multi_task.run import EXAMPLE as MULTI_TASK
from examples.geo3k_vlm.run import EXAMPLE as GEO3K
from examples.geo3k_vlm_multi_turn.run import EXAMPLE as GEO3K_TURNS
from examples.memagent.run import EXAMPLE as MEMAGENT
from examples.multi_agent.run import EXAMPLE as MULTI_AGENT
from examples.openai_agents.run import EXAMPLE as OPENAI_AGENTS
from examples.quickstart.recipe import Paths
from examples.retool.run import EXAMPLE as RETOOL
from examples.search_r1.run import EXAMPLE as SEARCH
from examples.small_run import without
from examples.strands_sglang.run import EXAMPLE as STRANDS
from examples.tau_bench.run import EXAMPLE as TAU_BENCH
from examples.tool_orchestra.run import EXAMPLE as TOOL_ORCHESTRA
from examples.tournament.run import EXAMPLE as TOURNAMENT
from slime.arguments import parse_args
from slime.arguments.files.environments import environments_of
from slime.utils.misc import load_function
from tests.support.arguments import CONFIG
from tests.support.strands_stub import ensure_strands
from tools import tiny_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    "example",
    [
        ADAPTIVE, CODING, DELTA, MULTI_AGENT, MULTI_TASK, RETOOL, SEARCH, TOURNAMENT, TAU_BENCH, AGENTFLOW, MEMAGENT,
        OPENAI_AGENTS, TOOL_ORCHESTRA, STRANDS, GEO3K, GEO3K_TURNS,
    ],
)  # fmt: skip
def test_the_command_line_of_grpo_is_accepted(example, tmp_path, monkeypatch):
    ensure_strands()
    monkeypatch.chdir(ROOT)
    paths = Paths(tmp_path)
    paths.sft_model.mkdir(parents=True)
    (paths.sft_model / "config.json").write_text(json.dumps(CONFIG))
    if example.model:
        monkeypatch.setattr(sys, "argv", ["tiny_model", "--out", str(paths.sft_model), *example.model])
        tiny_model.main()
    paths.data.mkdir()
    module = load_function(f"{example.package}.make_data.make_data")
    module(paths.data, seed=1, demonstrations=50)
    with example.service(paths) as more:
        args = parse_args([*example.grpo(paths, 0, rollouts=20, shuffled=True), *more])
    for entry in environments_of(args).values():
        load_function(entry.path)
    assert [dataset.name for dataset in args.eval_datasets] == [*example.data_sets, *example.watched]
    assert args.custom_reward_post_process_path == example.control
    if args.custom_generate_function_path == "slime.rollout.environments.generate":
        assert args.custom_rm_path is None
        assert args.rm_type is None
    rows = (paths.data / "sft.jsonl").read_text().splitlines()
    assert len(rows) == 50


def test_a_flag_goes_with_its_values():
    words = ["--a", "1", "2", "--b", "--c", "3"]
    assert without(words, "--a") == ["--b", "--c", "3"]
    assert without(words, "--b") == ["--a", "1", "2", "--c", "3"]
    assert without(words, "--c") == ["--a", "1", "2", "--b"]

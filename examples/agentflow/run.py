"""The small version: ``python -m examples.agentflow.run``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import yaml

from examples.agentflow.small_world import application
from examples.quickstart.recipe import Paths
from examples.quickstart.stages import ROOT
from examples.small_run import SmallExample
from slime.agent.aiohttp_threaded import run_app_in_thread

MARKS = ("<|im_start|>user\n", "<|im_end|>")


@contextlib.contextmanager
def models_by_rule(paths: Paths) -> Iterator[list[str]]:
    """Serve the rules that stand in the place of the models that are not trained; yield the flags that name them."""
    handle = run_app_in_thread(application(MARKS), host="127.0.0.1")
    settings = yaml.safe_load((ROOT / "examples/agentflow/small.yaml").read_text())
    config = paths.root / "agentflow.yaml"
    config.write_text(
        yaml.safe_dump({**settings, "agentflow_urls": {"executor": f"http://127.0.0.1:{handle.port}/generate"}})
    )
    try:
        yield ["--custom-config-path", str(config)]
    finally:
        handle.stop()


EXAMPLE = SmallExample(
    package="examples.agentflow",
    what="Queries of several steps: the planner learns which tool comes next.",
    data_sets=("queries",),
    targets={"queries": 0.7},
    flags=(
        "--prompt-data={data}/train.jsonl",
        "--label-key=label",
        "--custom-rm-path=examples.agentflow.rollout.reward_func",
        "--custom-rollout-log-function-path=examples.agentflow.rollout.rollout_log",
        "--custom-eval-rollout-log-function-path=examples.agentflow.rollout.eval_log",
        "--pg-loss-reducer=turn_mean",
    ),
    generate="examples.agentflow.rollout.generate",
    control="examples.executions.shuffled_rewards",
    service=models_by_rule,
    replaced={
        "--rollout-max-response-len": "18",
        "--rollout-batch-size": "32",
        "--kl-loss-coef": "0.01",
        "--lr": "4e-4",
        "--n-samples-per-eval-prompt": "2",
    },
    rollouts=20,
    sft_rollouts=30,
)

if __name__ == "__main__":
    sys.exit(EXAMPLE.main())

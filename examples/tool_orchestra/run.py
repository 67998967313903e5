"""The small version: ``python -m examples.tool_orchestra.run``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import yaml

from examples.quickstart.recipe import Paths
from examples.services import Service, Services
from examples.small_run import SmallExample
from examples.tool_orchestra.expert_server import PRICING
from slime.utils.network import find_available_port


@contextlib.contextmanager
def services(paths: Paths) -> Iterator[list[str]]:
    """Run the search engine and the experts; yield the flag with their addresses."""
    ports = {"retrieval": find_available_port(18_000), "experts": find_available_port(18_001)}
    modules = {"retrieval": "search_r1.retrieval_server", "experts": "tool_orchestra.expert_server"}
    corpus = str(paths.data / "corpus.jsonl")
    wanted = [
        Service(
            name,
            ("python", "-m", f"examples.{modules[name]}", "--corpus", corpus, "--port", str(port)),
            f"http://127.0.0.1:{port}/healthz",
        )
        for name, port in ports.items()
    ]
    settings = {
        "retrieval": f"http://127.0.0.1:{ports['retrieval']}/retrieve",
        "topk": 1,
        "urls": dict.fromkeys(PRICING, f"http://127.0.0.1:{ports['experts']}"),
        "system": "",
        "max_turns": 3,
        "call_s": 30,
    }
    config = paths.root / "orchestra.yaml"
    config.write_text(yaml.safe_dump({"tool_orchestra": settings}))
    with Services(wanted, paths.root / "logs"):
        yield ["--custom-config-path", str(config)]


EXAMPLE = SmallExample(
    package="examples.tool_orchestra",
    what="Questions that experts of different price and speed answer: the model learns whom to ask.",
    data_sets=("cheap", "fast"),
    targets={"cheap": 0.9, "fast": 0.9},
    flags=(
        "--prompt-data={data}/train.jsonl",
        "--label-key=label",
        "--group-rm",
        "--custom-rm-path=examples.tool_orchestra.reward.preference_reward",
        "--eval-function-path=examples.tool_orchestra.rollout.evaluate",
        "--custom-rollout-log-function-path=examples.tool_orchestra.rollout.log_executions",
        "--custom-eval-rollout-log-function-path=examples.tool_orchestra.rollout.log_evaluation",
    ),
    generate="examples.tool_orchestra.rollout.generate",
    control="examples.executions.shuffled_rewards",
    service=services,
    replaced={
        "--rollout-max-response-len": "80",
        "--rollout-batch-size": "32",
        "--n-samples-per-eval-prompt": "2",
        "--kl-loss-coef": "0.02",
        "--lr": "3e-4",
    },
    rollouts=20,
    sft_rollouts=16,  # what differs between its demonstrations is one of four calls
)

if __name__ == "__main__":
    sys.exit(EXAMPLE.main())

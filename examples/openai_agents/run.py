"""The small version: ``python -m examples.openai_agents.run``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from unittest import mock

from examples.quickstart.recipe import Paths
from examples.services import Service, Services
from examples.small_run import SmallExample
from slime.utils.network import find_available_port

BATCH, GROUP = 32, 8


@contextlib.contextmanager
def services(paths: Paths) -> Iterator[list[str]]:
    """Run the search engine of the data's corpus and a rollout buffer that starts gateway and agent; yield its flag."""
    search, buffer = find_available_port(18_000), find_available_port(18_889)
    wanted = [
        Service(
            "search",
            ("python", "-m", "examples.search_r1.retrieval_server", "--corpus", str(paths.data / "corpus.jsonl"))
            + ("--port", str(search)),
            f"http://127.0.0.1:{search}/healthz",
        ),
        # No more than a rollout waits for the trainer: agents do not run further ahead of its weights.
        Service(
            "buffer",
            ("python", "-m", "slime_plugins.rollout_buffer.buffer", "--port", str(buffer))
            + ("--generator", "examples.openai_agents.generator", "--max-items", str(BATCH * GROUP)),
            f"http://127.0.0.1:{buffer}/healthz",
        ),
    ]
    variables = {"AGENT_SEARCH_URL": f"http://127.0.0.1:{search}/retrieve", "AGENT_TOPK": "1", "AGENT_MAX_TURNS": "2"}
    with mock.patch.dict("os.environ", variables), Services(wanted, paths.root / "logs"):
        yield ["--rollout-buffer-url", f"http://127.0.0.1:{buffer}"]


EXAMPLE = SmallExample(
    package="examples.openai_agents",
    what="Facts that cannot be guessed: an agent of the OpenAI Agents SDK learns to search.",
    data_sets=("facts",),
    flags=(
        "--prompt-data={data}/train.jsonl",
        "--label-key=label",
        "--rollout-function-path=slime_plugins.rollout_buffer.rollout_buffer_example.generate_rollout",
        "--rollout-task-type=openai_agents",
        "--eval-function-path=examples.openai_agents.evaluation.evaluate",
        "--use-tis",
    ),
    generate="",
    service=services,
    replaced={
        "--rollout-max-response-len": "100",
        "--rollout-batch-size": str(BATCH),
        "--n-samples-per-prompt": str(GROUP),
        "--n-samples-per-eval-prompt": "1",
        "--kl-loss-coef": "0.03",
    },
    rollouts=20,
)

if __name__ == "__main__":
    sys.exit(EXAMPLE.main())

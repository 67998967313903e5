"""The small version: ``python -m examples.search_r1.run``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import yaml

from examples.quickstart.recipe import Paths
from examples.search_r1.retrieval_server import Index, application, read_corpus
from examples.small_run import SmallExample
from slime.agent.aiohttp_threaded import run_app_in_thread


@contextlib.contextmanager
def search_engine(paths: Paths) -> Iterator[list[str]]:
    """Run the retrieval server of the data's corpus; yield the flags of the environment that asks it."""
    handle = run_app_in_thread(application(Index(read_corpus(paths.data / "corpus.jsonl"))), host="127.0.0.1")
    entry = {
        "path": "examples.search_r1.environment.Search",
        "name": "search",
        "max_turns": 2,
        "step_timeout": 30,
        "options": {"url": f"http://127.0.0.1:{handle.port}/retrieve", "topk": 1},
    }
    config = paths.root / "environments.yaml"
    config.write_text(yaml.safe_dump({"environments": [entry]}))
    try:
        yield ["--environment-config", str(config)]
    finally:
        handle.stop()


EXAMPLE = SmallExample(
    package="examples.search_r1",
    what="Facts that cannot be guessed: the model learns to search.",
    data_sets=("facts",),
    targets={"facts": 0.7},
    flags=(
        "--prompt-data={data}/train.jsonl",
        "--label-key=label",
        "--rollout-stop=</search>",
    ),
    service=search_engine,
    replaced={"--rollout-max-response-len": "140", "--rollout-batch-size": "32", "--kl-loss-coef": "0.03"},
    rollouts=20,
)

if __name__ == "__main__":
    sys.exit(EXAMPLE.main())

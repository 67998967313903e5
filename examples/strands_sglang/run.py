"""The small version: ``python -m examples.strands_sglang.run``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from examples.quickstart.recipe import Paths
from examples.quickstart.stages import StageError
from examples.small_run import SmallExample
from examples.strands_sglang.generate import require_packages


@contextlib.contextmanager
def packages(paths: Paths) -> Iterator[list[str]]:
    """Say what is missing before the run starts."""
    try:
        require_packages()
    except ImportError as e:
        raise StageError(str(e)) from e
    yield []


EXAMPLE = SmallExample(
    package="examples.strands_sglang",
    what="Products of three numbers: an agent of Strands Agents learns to use an interpreter.",
    data_sets=("products",),
    flags=(
        "--prompt-data={data}/train.jsonl",
        "--label-key=label",
        "--custom-rm-path=examples.strands_sglang.generate.reward_func",
        "--custom-config-path=examples/strands_sglang/small.yaml",
    ),
    generate="examples.strands_sglang.generate.generate",
    service=packages,
    replaced={
        "--rollout-max-response-len": "150",
        "--rollout-batch-size": "32",
        "--kl-loss-coef": "0.03",
        "--n-samples-per-eval-prompt": "1",
    },
    rollouts=20,
)

if __name__ == "__main__":
    sys.exit(EXAMPLE.main())

"""The small version: ``python -m examples.strands_sglang.run``."""

from __future__ import annotations

import sys
from typing import Any

from examples.quickstart.recipe import Paths
from examples.quickstart.stages import StageError
from examples.small_run import SmallExample
from examples.strands_sglang.generate import require_packages


class StrandsExample(SmallExample):
    """Says what is missing before the first stage."""

    def run(self, paths: Paths, seed: int, rollouts: int, shuffled: bool) -> dict[str, Any]:
        try:
            require_packages()
        except ImportError as e:
            raise StageError(str(e)) from e
        return super().run(paths, seed, rollouts, shuffled)


EXAMPLE = StrandsExample(
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

"""Following the page "Add an advantage estimator" is enough: flag, rules, rewards and advantages know the entry."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.algorithms.estimators import ESTIMATORS, estimator_of
from slime.utils.misc import load_function
from tests.support.arguments import run_args
from tests.support.followed_page import follow, run_followed
from tests.support.run_train import ROOT

PAGE = ROOT / "docs" / "en" / "developer_guide" / "add_an_estimator.md"
PROGRAM = """
import json
import torch
from slime.algorithms.rewards import normalize_rewards
from slime.backends.megatron_utils.train.loss import compute_advantages_and_returns
from slime.utils.types import Sample
from tests.support.arguments import dry

words = ("--advantage-estimator", "discounted_grpo", "--gamma", "0.5", "--n-samples-per-prompt", "2")
args, with_kl = dry(*words), dry(*words, "--kl-coef", "0.1", "--ref-load", "/")
samples = [Sample(index=i, group_index=0, reward=float(i == 0)) for i in range(2)]
data = {
    "total_lengths": [6, 3],
    "response_lengths": [4, 2],
    "loss_masks": [torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.ones(2)],
    "rewards": normalize_rewards(args, samples),
}
compute_advantages_and_returns(args, data)
print(json.dumps({
    "rewards": data["rewards"],
    "advantages": [values.tolist() for values in data["advantages"]],
    "returns": [values.tolist() for values in data["returns"]],
    "critic": args.use_critic,
    "warnings": [args.warnings, with_kl.warnings],
}))
"""


def test_following_the_page_adds_an_estimator(tmp_path: Path) -> None:
    follow(PAGE, tmp_path)
    found = run_followed(tmp_path, PROGRAM)
    reward = 0.5 / (0.5**0.5 + 1e-6)  # of 1 and 0: the deviation is 1/2, the unbiased standard deviation 1/sqrt(2)
    assert found["rewards"] == pytest.approx([reward, -reward])
    expected = [[reward / 4, 0.0, reward / 2, reward], [-reward / 2, -reward]]
    assert found["advantages"] == [pytest.approx(row) for row in expected]
    assert found["returns"] == found["advantages"]
    assert found["critic"] is False
    plain, with_kl = (" ".join(said) for said in found["warnings"])
    assert "--gamma" not in plain
    assert "--kl-coef 0.1 has no effect with --advantage-estimator discounted_grpo" in with_kl


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_function_of_the_table_can_be_loaded(name: str) -> None:
    assert callable(load_function(ESTIMATORS[name].advantages))


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"--advantage-estimator magic is unknown; expected one of grpo, .*, ppo"):
        estimator_of(run_args(advantage_estimator="magic"))

"""Seeds of deterministic sampling: every draw of a prompt has its own."""

from __future__ import annotations

from typing import Any

from slime.rollout import sglang_rollout
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.requests.generate_state import Bookkeeping
from slime.rollout.sglang_rollout import eval_rollout, generate_rollout
from slime.utils.async_utils import run
from slime.utils.types import Sample
from tests.support.rollout_args import eval_config, write_prompts


def seeds_of(cluster: Any) -> dict[str, list[int]]:
    """By prompt, in the order of the requests; forgets them."""
    found: dict[str, list[int]] = {}
    for request in cluster.requests:
        text = "".join(map(chr, request["input_ids"]))
        found.setdefault(text, []).append(request["sampling_params"]["sampling_seed"])
    for engine in cluster.engines:
        engine.requests.clear()
    return found


def test_a_prompt_has_other_seeds_in_the_next_epoch_and_the_same_after_a_resume(cluster, make_args):
    args = make_args(sglang_enable_deterministic_inference=True)
    source = RolloutDataSourceWithBuffer(args)
    per_epoch = len(source) // args.rollout_batch_size
    states, rounds = [], []
    for rollout_id in range(2 * per_epoch):
        states.append(source.state_dict())
        generate_rollout(args, rollout_id, source)
        rounds.append(seeds_of(cluster))
    epochs = [{text for one in half for text in one} for half in (rounds[:per_epoch], rounds[per_epoch:])]
    assert epochs[0] == epochs[1]  # the same prompts
    made = [seed for one in rounds for seeds in one.values() for seed in seeds]
    assert len(set(made)) == len(made)
    resumed = RolloutDataSourceWithBuffer(args)
    resumed.load_state_dict(states[-1])
    generate_rollout(args, 2 * per_epoch - 1, resumed)
    again = seeds_of(cluster)
    assert {text: set(seeds) for text, seeds in again.items()} == {
        text: set(seeds) for text, seeds in rounds[-1].items()
    }


def test_groups_without_a_number_have_the_seeds_of_the_rollout(make_args):
    args, state = make_args(), Bookkeeping()
    found = []
    for state.rollout_id in range(2):
        found += [
            sglang_rollout._sampling_seed(args, state, Sample(index=index), number)
            for index in range(3)
            for number in range(2)
        ]
    assert len(set(found)) == 12


def test_prompts_of_an_evaluation_have_seeds_of_their_own_and_the_same_in_the_next(cluster, make_args, tmp_path):
    path = str(write_prompts(tmp_path / "eval.jsonl", 3))
    sets = [eval_config(path, name, n_samples_per_eval_prompt=2) for name in ("one", "two")]
    args = make_args(sglang_enable_deterministic_inference=True, eval_datasets=sets)
    rounds = []
    for rollout_id in range(2):
        run(eval_rollout(args, rollout_id))
        rounds.append(sorted(seed for seeds in seeds_of(cluster).values() for seed in seeds))
    assert len(set(rounds[0])) == 2 * 3 * 2
    assert rounds[0] == rounds[1]

"""``--rollout-function-path`` and ``--eval-function-path``."""

from __future__ import annotations

import pytest

from slime.ray.manager.conversion import Converter
from slime.ray.manager.rollout_metrics import eval_metrics
from slime.rollout.base_types import call_rollout_fn, check_sibling_rollout_ids, iter_samples
from tests.plugin_contracts.contract import EXAMPLES, hook_at, must, must_be_finished, must_be_finite, subjects

BUILT_IN = (
    "slime.rollout.sglang_rollout.generate_rollout",
    "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
)


@pytest.mark.parametrize("path", subjects("ROLLOUT_FUNCTION_PATH", *BUILT_IN, f"{EXAMPLES}.rollout"))
def test_a_rollout_function_makes_what_can_be_trained_on(path, args, source):
    hook = hook_at("ROLLOUT_FUNCTION_PATH", path)
    output = call_rollout_fn(hook, args, 0, source, evaluation=False)
    count = args.rollout_batch_size
    must(len(output.samples) == count, hook, f"--rollout-batch-size {count} groups", f"{len(output.samples)} groups")
    for group in output.samples:
        must(isinstance(group, list), hook, "every group to be a list", group)
        must_be_finished(hook, list(iter_samples(group)), scored=True)
        one = {sample.group_index for sample in iter_samples(group)}
        must(len(one) == 1, hook, "all samples of a group to have the group_index of their prompt", one)
    check_sibling_rollout_ids(output.samples)
    samples = list(iter_samples(output.samples))
    indices = [sample.index for sample in samples]
    if not any(sample.rollout_id is not None for sample in samples):
        must(len(set(indices)) == len(indices), hook, "samples to keep the index that the data source gave", indices)
    metrics = output.metrics or {}
    must(all(isinstance(name, str) for name in metrics), hook, "metrics to be a dict with names as keys", metrics)

    converter = Converter(args)
    converter.train_parallel_config = {
        "dp_size": 1, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1,
    }  # fmt: skip
    assert sum(map(len, converter.shards(samples))) == len(samples)
    again = call_rollout_fn(hook, args, 1, source, evaluation=False)
    both = [group for output_ in (output, again) for group in output_.samples]
    drawn = [next(iter_samples(group)).group_index for group in both]
    must(len(set(drawn)) == len(drawn), hook, "the next rollout to go on with the next prompts", drawn)


@pytest.mark.parametrize(
    "path", subjects("EVAL_FUNCTION_PATH", *BUILT_IN, f"{EXAMPLES}.rollout", f"{EXAMPLES}.constant_evaluation")
)
def test_an_evaluation_function_reports_data_sets(path, args, source):
    hook = hook_at("EVAL_FUNCTION_PATH", path)
    output = call_rollout_fn(hook, args, 3, source, evaluation=True)
    must(output.data, hook, "at least one data set", output.data)
    for name, result in output.data.items():
        must_be_finite(hook, result["rewards"], f"rewards of data set {name!r}")
        for key in ("truncated", "samples"):
            must(
                key not in result or len(result[key]) == len(result["rewards"]), hook,
                f"{key!r} of data set {name!r} to have an entry per reward ({len(result['rewards'])})", result.get(key),
            )  # fmt: skip
    assert {f"eval/{name}" for name in output.data} <= eval_metrics(args, output.data).keys()

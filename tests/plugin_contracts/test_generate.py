"""``--custom-generate-function-path``."""

from __future__ import annotations

import asyncio

import pytest

from slime.rollout.base_types import check_sibling_rollout_ids, iter_samples
from slime.rollout.sglang_rollout import GenerateState, call_generate, generate_and_rm_group
from slime.utils.async_utils import run
from tests.plugin_contracts.contract import EXAMPLES, hook_at, must, must_be_finished, subjects

NAME = "CUSTOM_GENERATE_FUNCTION_PATH"
PATHS = subjects(
    NAME, "slime.rollout.sglang_rollout.generate", "slime.rollout.sglang_streaming_rollout.generate_streaming",
    *(f"{EXAMPLES}.{name}" for name in ("two_turns", "fan_out", "plain_generate")),
)  # fmt: skip


@pytest.mark.parametrize("evaluation", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_a_generate_function_fills_the_sample(path, evaluation, args, source):
    hook = hook_at(NAME, path)
    prompts = [group[0] for group in source.get_samples(2)]
    expected = [(sample.index, sample.group_index) for sample in prompts]

    async def generate_both():
        params = GenerateState(args).sampling_params
        calls = [call_generate(hook, args, sample, params.copy(), evaluation) for sample in prompts]
        return await asyncio.gather(*calls)

    for (_, group_index), result in zip(expected, run(generate_both()), strict=True):
        leaves = list(iter_samples(result))
        must(leaves, hook, "at least one sample", result)
        must_be_finished(hook, leaves, scored=False)
        must(
            all(leaf.group_index == group_index for leaf in leaves), hook,
            f"samples of a prompt to keep its group_index {group_index}, also when several are under way",
            [leaf.group_index for leaf in leaves],
        )  # fmt: skip
        try:
            check_sibling_rollout_ids([[leaves]])
        except AssertionError as e:
            must(False, hook, "samples of one trajectory to share a rollout_id that is set", str(e))
        with_log_probs = {leaf.rollout_log_probs is not None for leaf in leaves if leaf.effective_response_length}
        must(len(with_log_probs) < 2, hook, "rollout_log_probs for all samples that are trained on, or for none")


@pytest.mark.parametrize("path", PATHS)
def test_a_generate_function_works_under_the_flag_and_as_a_sample_s_own(path, args, source):
    hook = hook_at(NAME, path)
    for own in (False, True):
        (group,) = source.get_samples(1)
        args.custom_generate_function_path = None if own else path
        for sample in group:
            sample.generate_function_path = path if own else None
        done = run(generate_and_rm_group(args, group, GenerateState(args).sampling_params.copy()))
        must(len(done) == len(group), hook, "one result per sample of the group", done)
        must_be_finished(hook, list(iter_samples(done)), scored=True)

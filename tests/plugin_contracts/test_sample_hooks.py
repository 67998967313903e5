"""``--rollout-sample-hook-path``."""

from __future__ import annotations

import pytest

from slime.rollout.base_types import iter_samples
from slime.rollout.sample_hooks import apply_sample_hooks
from slime.utils.async_utils import run
from tests.plugin_contracts.contract import EXAMPLES, hook_at, must, must_be_finished, subjects

NAME = "ROLLOUT_SAMPLE_HOOK_PATH"


@pytest.mark.parametrize("evaluation", [False, True])
@pytest.mark.parametrize("path", subjects(NAME, f"{EXAMPLES}.note_rollout", f"{EXAMPLES}.replace_sample"))
def test_a_sample_hook_returns_the_sample_to_continue_with(path, evaluation, args, groups):
    hook = hook_at(NAME, path)
    args.rollout_sample_hook_path = [path]
    nested = [groups[0][0], [groups[0][1], [groups[1][0]]]]
    for sample in iter_samples(nested):
        sample.reward = None  # it comes after the hooks
    found = run(apply_sample_hooks(args, nested, rollout_id=3, evaluation=evaluation))
    samples = list(iter_samples(found))
    must(len(samples) == 3, hook, "one sample for each that it was given", samples)
    must_be_finished(hook, samples, scored=False)
    ids = [sample.group_index for sample in samples]
    must(ids == [s.group_index for s in iter_samples(nested)], hook, "samples to keep their group_index", ids)

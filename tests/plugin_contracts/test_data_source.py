"""``--data-source-path`` and ``--buffer-filter-path``."""

from __future__ import annotations

import copy

import pytest

from slime.rollout.base_types import iter_samples
from slime.rollout.data_source import draw_groups
from slime.utils.types import Sample
from tests.plugin_contracts.contract import EXAMPLES, fingerprint, hook_at, must, subjects

BUILT_IN = "slime.rollout.data_source"
SOURCES = subjects("DATA_SOURCE_PATH", f"{BUILT_IN}.RolloutDataSource", f"{BUILT_IN}.RolloutDataSourceWithBuffer")


@pytest.mark.parametrize("path", SOURCES)
def test_a_data_source_hands_out_numbered_groups(path, args):
    hook = hook_at("DATA_SOURCE_PATH", path)
    args.data_source_path = path
    made = hook(args)
    must(isinstance(len(made), int), hook, "__len__ to give the number of prompts of an epoch", len(made))
    groups = [*draw_groups(args, made.get_samples, 3), *draw_groups(args, made.get_samples, 2)]
    must(len(groups) == 5, hook, "as many groups as were asked for", len(groups))
    samples = list(iter_samples(groups))
    must(all(isinstance(s, Sample) for s in samples), hook, "groups of slime.utils.types.Sample", samples)
    must(len({id(s) for s in samples}) == len(samples), hook, "every sample to be an object of its own (deep copies)")
    indices = [s.index for s in samples]
    must(None not in indices and len(set(indices)) == len(indices), hook, "an index of its own per sample", indices)
    numbers = [{s.group_index for s in group} for group in groups]
    must(
        all(len(n) == 1 and None not in n for n in numbers) and len(set(map(tuple, numbers))) == 5, hook,
        "one group_index per group, shared by its samples", numbers,
    )  # fmt: skip
    first = samples[0]
    first.metadata["changed"] = True
    must("changed" not in (samples[1].metadata or {}), hook, "samples of a group to have metadata of their own")


@pytest.mark.parametrize("path", SOURCES)
def test_a_data_source_resumes_where_it_was_saved(path, args):
    hook = hook_at("DATA_SOURCE_PATH", path)
    args.data_source_path = path
    first = hook(args)
    first.get_samples(2)
    if hasattr(first, "snapshot"):
        first.snapshot(0)
    first.save(0)
    expected = fingerprint(first.get_samples(3))
    second = hook(args)
    second.load(0)
    found = fingerprint(second.get_samples(3))
    must(found == expected, hook, "load(rollout_id) to go on with the prompt after those of save(rollout_id)", found)
    fresh = hook(args)
    fresh.load(None)  # a run that starts at the beginning
    must(len(fresh.get_samples(1)) == 1, hook, "load(None) to be harmless")


@pytest.mark.parametrize("path", SOURCES)
def test_groups_that_are_handed_back_come_again(path, args):
    hook = hook_at("DATA_SOURCE_PATH", path)
    args.data_source_path = path
    made = hook(args)
    if not getattr(made, "accepts_samples", True):
        pytest.skip(f"{hook} says that it takes no samples back (accepts_samples = False)")
    groups = made.get_samples(2)
    made.add_samples(groups)
    drawn = fingerprint(made.get_samples(4))
    must(
        all(one in drawn for one in fingerprint(groups)), hook,
        "groups given to add_samples to be handed out again: what a rollout does not use must not be lost", drawn,
    )  # fmt: skip


@pytest.mark.parametrize("path", subjects("BUFFER_FILTER_PATH", f"{BUILT_IN}.pop_first", f"{EXAMPLES}.newest_first"))
def test_a_buffer_filter_takes_out_what_it_returns(path, args, source):
    hook = hook_at("BUFFER_FILTER_PATH", path)
    for held, asked in ((3, 2), (3, 3), (2, 5)):
        buffer = source.get_samples(held)
        before = copy.copy(buffer)
        taken = hook(args, None, buffer, asked)
        must(isinstance(taken, list), hook, "a list of groups", taken)
        must(len(taken) <= asked, hook, f"at most num_samples={asked} groups", f"{len(taken)} groups")
        kept = [id(group) for group in buffer]
        must(
            all(id(group) not in kept for group in taken), hook,
            "the groups it returns to be removed from the buffer, in place: they would be handed out twice",
        )  # fmt: skip
        known = {id(group) for group in before}
        must(
            all(id(group) in known for group in [*taken, *buffer]), hook,
            "groups of the buffer, as they are, to be returned or kept",
        )  # fmt: skip

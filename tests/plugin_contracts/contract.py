"""Choice of the hook that a contract is checked on, and the report of a broken contract.

``SLIME_CONTRACT_<NAME>=package.module.attr`` puts a hook of the user's in the place of the built-in ones and leaves out
the contracts of all other hooks.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Sequence
from typing import Any

from slime.rollout.base_types import iter_samples
from slime.rollout.hooks.hook import Hook, make_hook
from slime.utils.misc import load_function
from slime.utils.types import Sample

PREFIX = "SLIME_CONTRACT_"
NAMES = (
    "ROLLOUT_FUNCTION_PATH",
    "EVAL_FUNCTION_PATH",
    "CUSTOM_GENERATE_FUNCTION_PATH",
    "ROLLOUT_SAMPLE_HOOK_PATH",
    "CUSTOM_RM_PATH",
    "GROUP_RM",
    "DYNAMIC_SAMPLING_FILTER_PATH",
    "BUFFER_FILTER_PATH",
    "DATA_SOURCE_PATH",
    "ROLLOUT_SAMPLE_FILTER_PATH",
    "ROLLOUT_ALL_SAMPLES_PROCESS_PATH",
    "CUSTOM_ROLLOUT_LOG_FUNCTION_PATH",
    "CUSTOM_EVAL_ROLLOUT_LOG_FUNCTION_PATH",
    "CUSTOM_REWARD_POST_PROCESS_PATH",
    "CUSTOM_CONVERT_SAMPLES_TO_TRAIN_DATA_PATH",
    "ROLLOUT_DATA_POSTPROCESS_PATH",
)
"""Of GROUP_RM the value is no path: 1 says that the custom reward takes the list of a group's samples, 0 that not."""
OTHERS = ("ARGS",)
"""``SLIME_CONTRACT_ARGS``: more words of the command line, for what the hook reads of the arguments."""

EXAMPLES = "tests.plugin_contracts.examples"


def unknown_names() -> list[str]:
    """Return what is wrong with the names of the environment variables that are set."""
    known = [PREFIX + name for name in (*NAMES, *OTHERS)]
    found = []
    for name in os.environ:
        if name.startswith(PREFIX) and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            found.append(f"{name} is no contract{f'; did you mean {near[0]}?' if near else ''}")
    return found


def subjects(name: str, *built_in: str) -> list[str]:
    """Return the paths of the hooks to check: the user's, or ours when the user has named none of any kind."""
    own = os.environ.get(PREFIX + name)
    if own:
        return [own]
    return [] if any(os.environ.get(PREFIX + other) for other in NAMES if other != "GROUP_RM") else list(built_in)


def hook_at(name: str, path: str) -> Hook:
    """Return the hook, checked as at the start of a run."""
    attribute = name.lower()
    if name == "ROLLOUT_DATA_POSTPROCESS_PATH":  # of the trainers
        return Hook("--rollout-data-postprocess-path", path, load_function(path, "--rollout-data-postprocess-path"))
    return make_hook(path, attribute)


def must(holds: Any, hook: Hook, expected: str, seen: Any = "") -> None:
    """Fail with what the contract of ``hook`` expects and what was seen instead, unless it ``holds``."""
    if not holds:
        raise AssertionError(
            f"{hook} breaks its contract: expected {expected}{f'; got {seen!r:.300}' if seen != '' else ''}"
        )


def must_be_finished(hook: Hook, samples: Sequence[Any], *, scored: bool) -> None:
    """Check what training asks of samples: types, lengths that agree, and with ``scored`` rewards."""
    for sample in samples:
        must(isinstance(sample, Sample), hook, "every item to be a slime.utils.types.Sample", sample)
        name = f"of sample index={sample.index}"
        over = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED, Sample.Status.FAILED)
        must(sample.status in over, hook, f"the status {name} to be COMPLETED, TRUNCATED or FAILED", sample.status)
        count = sample.response_length
        must(
            0 <= count < len(sample.tokens), hook,
            f"tokens {name} to be the prompt and then response_length tokens, with at least one of the prompt",
            {"response_length": count, "tokens": len(sample.tokens)},
        )  # fmt: skip
        for field in ("loss_mask", "rollout_log_probs", "teacher_log_probs"):
            values = getattr(sample, field)
            must(
                values is None or len(values) == count, hook,
                f"{field} {name} to have one entry per response token ({count}), tool text included",
                None if values is None else f"{len(values)} entries",
            )  # fmt: skip
        must(
            sample.loss_mask is None or set(map(int, sample.loss_mask)) <= {0, 1}, hook,
            f"loss_mask {name} to hold 0 and 1 only", sample.loss_mask,
        )  # fmt: skip
        must(sample.group_index is not None, hook, f"group_index {name} to be set: rewards are compared within it")
        if scored:
            must(sample.reward is not None, hook, f"a reward {name}")


def must_be_finite(hook: Hook, values: Sequence[Any], what: str) -> None:
    """Check numbers."""
    for position, value in enumerate(values):
        try:
            good = math.isfinite(float(value))
        except (TypeError, ValueError):
            good = False
        must(good, hook, f"{what}[{position}] to be a finite number", value)


def fingerprint(nested: Any) -> list[tuple[Any, ...]]:
    """Return what hooks that only look at samples must leave as it is."""
    return [
        (s.index, s.group_index, s.rollout_id, list(s.tokens), s.response, s.response_length, s.status)
        for s in iter_samples(nested)
    ]

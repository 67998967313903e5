"""Built-in rewards (``--rm-type``) and the dispatch to custom ones (``--custom-rm-path``)."""

from __future__ import annotations

import asyncio
import copy
import logging
import random
from typing import Any

from slime.arguments.rules.reward import NOT_YET, RM_TYPES
from slime.rollout.rm_hub.deepscaler import final_part, get_deepscaler_rule_based_reward
from slime.rollout.rm_hub.f1 import f1_score
from slime.rollout.rm_hub.gpqa import compute_gpqa_reward
from slime.rollout.rm_hub.math_dapo_utils import compute_score as compute_score_dapo
from slime.rollout.rm_hub.math_utils import (
    extract_answer,
    extract_boxed_answer,
    grade_answer_verl,
    ground_truth_answer,
    quick_grade,
)
from slime.rollout.rm_hub.rule_worker import get_rule_workers
from slime.utils.misc import load_function
from slime.utils.types import Sample

__all__ = [
    "async_rm",
    "batched_async_rm",
    "compute_gpqa_reward",
    "compute_score_dapo",
    "extract_boxed_answer",
    "f1_score",
    "get_deepscaler_rule_based_reward",
    "grade_answer_verl",
    "remote_rm",
]

logger = logging.getLogger(__name__)

REMOTE_CONNECTIONS, REMOTE_TIMEOUT_S, REMOTE_ATTEMPTS = 64, 120.0, 10
_remote_client: Any = None


async def remote_rm(args: Any, sample: Sample) -> Any:
    """Return the JSON reply of ``POST args.rm_url`` with prompt, response and label.

    Ten attempts of at most 120 s each. Raises HttpRequestError: at once for a refusal (4xx), else after the last one.
    """
    from slime.utils.http_client import HttpClient, HttpRequestError

    global _remote_client
    if not getattr(args, "rm_url", None):
        raise ValueError("--rm-type remote_rm needs --rm-url")
    if _remote_client is None:
        _remote_client = HttpClient(REMOTE_CONNECTIONS)
    payload = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
    attempt = 0
    while True:
        try:
            return await _remote_client.post(args.rm_url, payload, max_retries=1, timeout=REMOTE_TIMEOUT_S)
        except HttpRequestError as e:
            attempt += 1
            refused = e.status is not None and 400 <= e.status < 500 and e.status != 429
            if refused or attempt >= REMOTE_ATTEMPTS:
                raise
            logger.warning("reward request %d of %d failed: %s", attempt, REMOTE_ATTEMPTS, e)
        await asyncio.sleep(min(2.0**attempt, 30.0) + random.random())


async def _grade_math(solution: str | None, label: Any) -> int:
    """Grade the last box of ``solution`` against ``label``; only what needs sympy leaves this process."""
    given = None if solution is None else extract_answer(solution)
    truth = ground_truth_answer(label)
    if given is None or truth is None:
        return 0
    verdict = quick_grade(given, truth)
    if verdict is None:
        verdict = await get_rule_workers().ask("equal_values", given, truth)
    return int(verdict)


async def async_rm(args: Any, sample: Sample, **kwargs: Any) -> Any:
    """Return the reward of one sample.

    The reward is, in this order: ``sample.custom_rm_path``, ``args.custom_rm_path``, ``sample.metadata["rm_type"]``,
    ``args.rm_type``. With a ``boxed_`` prefix a type sees only the content of the last box. Raises NotImplementedError
    for an unknown type and RewardTimeout when a built-in reward exceeds its limit.
    """
    path = sample.custom_rm_path or getattr(args, "custom_rm_path", None)
    if path is not None:
        return await load_function(path, "--custom-rm-path")(args, sample, **kwargs)
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    rm_type = (metadata.get("rm_type") or getattr(args, "rm_type", None) or "").strip()
    response = sample.response
    kind = rm_type
    if rm_type.startswith("boxed_"):
        response = extract_boxed_answer(response) or ""
        kind = rm_type.removeprefix("boxed_")
    match kind:
        case "remote_rm":
            if kind != rm_type:
                sample = copy.copy(sample)
                sample.response = response
            return await remote_rm(args, sample)
        case "math":
            return await _grade_math(response, sample.label)
        case "deepscaler":
            return await _grade_math(final_part(response), sample.label)
        case "dapo":
            return compute_score_dapo(response, sample.label)
        case "f1":
            return f1_score(response, sample.label or "")[0]
        case "gpqa":
            return compute_gpqa_reward(response, sample.label, metadata)
        case "random":
            return random.randint(0, 1)
    raise NotImplementedError(
        f"no reward for sample index={sample.index}: rm_type {rm_type!r} is unknown. Set --rm-type to one of "
        f"{', '.join(kind for kind in RM_TYPES if kind not in NOT_YET)} (each also as boxed_<type>), or "
        "--custom-rm-path to your own function."
    )


async def batched_async_rm(args: Any, samples: list[Sample], **kwargs: Any) -> list[Any]:
    """Return the rewards of several samples: from ``args.custom_rm_path`` called with the list, or one by one."""
    path = getattr(args, "custom_rm_path", None)
    if path is not None:
        return await load_function(path, "--custom-rm-path")(args, samples, **kwargs)
    return list(await asyncio.gather(*(async_rm(args, sample, **kwargs) for sample in samples)))

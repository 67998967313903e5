"""AgentFlow (arXiv:2510.05592): the functions that flags name.

An execution is a flow of agents, of which the planner is trained: each of its turns is a sample, with a prompt of its
own, and all have the reward of the answer that the flow ends with.
"""

from __future__ import annotations

import logging
import statistics
from argparse import Namespace
from collections import Counter
from typing import Any

from examples.agentflow.flow import Flow
from examples.agentflow.prompts import PROMPTS
from examples.agentflow.services import ServiceFailure, Settings
from examples.executions import settings_of
from slime.observability.logging_utils import log
from slime.utils.types import Sample

logger = logging.getLogger(__name__)
EVAL_ATTEMPTS = 3
"""An evaluation needs every execution: one that a service fails begins again, then the run stops."""
LOGGED_PER_SERVICE = 3
_failures: Counter[str] = Counter()


async def generate(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Return the samples of the policy's turns in an execution, in order; in an evaluation the last of them.

    A service that does not answer makes the execution ABORTED, with ``metadata["abort_reason"]``: its group is drawn
    again, and nothing of it is trained on. In an evaluation it is raised after ``EVAL_ATTEMPTS``.
    """
    settings = settings_of(args, Settings, "agentflow_", PROMPTS)
    for attempt in range(1, EVAL_ATTEMPTS + 1):
        flow = Flow(args, settings, sample, sampling_params, evaluation)
        try:
            await flow.run()
            if flow.samples[-1].status == Sample.Status.ABORTED:  # the rollout ends
                sample.status = Sample.Status.ABORTED
                return sample
            right = await flow.is_right()
        except ServiceFailure as e:
            _failures[e.service] += 1
            if _failures[e.service] <= LOGGED_PER_SERVICE:
                logger.error("sample index=%s group_index=%s: %s", sample.index, sample.group_index, e)
            if not evaluation:
                sample.status = Sample.Status.ABORTED
                failure = {"abort_reason": f"service.{e.service}", "abort_error": str(e)}
                sample.metadata = {**(sample.metadata or {}), **failure}
                return sample
            if attempt == EVAL_ATTEMPTS:
                raise
            continue
        outcome = {"right": right, "steps": len(flow.steps), "tool_errors": sum(step.failed for step in flow.steps)}
        for one in flow.samples:
            one.metadata |= outcome
        return flow.samples[-1] if evaluation else flow.samples
    raise AssertionError("every attempt returns or raises")


async def reward_func(args: Namespace, sample: Sample | list[Sample], **kwargs: Any) -> float | list[float]:
    """Return 1 for an execution whose answer is right, else 0 (``--custom-rm-path``), once for each of its samples."""
    if isinstance(sample, Sample):
        return float(sample.metadata["right"])
    return [float(one.metadata["right"]) for one in sample]


def rollout_log(
    rollout_id: int, args: Namespace, samples: list[Sample], metrics: dict[str, Any], seconds: float
) -> bool:
    """Log steps, tool errors and turns per execution (``--custom-rollout-log-function-path``), and leave the rest."""
    log(args, {**_of_executions(samples, "rollout/agentflow/"), "rollout/step": rollout_id}, "rollout/step")
    return False


def eval_log(rollout_id: int, args: Namespace, data: dict[str, Any], extra_metrics: dict[str, Any] | None) -> bool:
    """Log the same of each data set (``--custom-eval-rollout-log-function-path``), and leave the rest."""
    metrics: dict[str, float] = {}
    for name, result in data.items():
        metrics |= _of_executions(result["samples"], f"eval/{name}/")
    log(args, {**metrics, "eval/step": rollout_id}, "eval/step")
    return False


def _of_executions(samples: list[Sample], prefix: str) -> dict[str, float]:
    """Return means over executions, whose samples share ``rollout_id``."""
    executions = {one.rollout_id: one for one in samples}.values()
    steps = [one.metadata["steps"] for one in executions]
    return {
        f"{prefix}steps": statistics.fmean(steps),
        f"{prefix}tool_error_rate": sum(one.metadata["tool_errors"] for one in executions) / max(1, sum(steps)),
        f"{prefix}samples_per_execution": len(samples) / len(executions),
    }

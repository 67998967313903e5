"""The functions that flags name: generation (``--custom-generate-function-path``) and a metric per agent."""

from __future__ import annotations

import statistics
from argparse import Namespace
from typing import Any

from examples.multi_agent.agent_system import ROLES, run_agent_system
from slime.observability.logging_utils import log
from slime.rollout.rm_hub.failure import RewardFailure
from slime.utils.types import Sample


async def generate_with_multi_agents(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Return the samples of all agents, rewarded; in an evaluation the selected solution, scored by the rule.

    Prompts are messages, without ``--apply-chat-template``; the reward is ``--rm-type`` or a ``--custom-rm-path`` of
    single samples. A reward that fails aborts the execution.
    """
    try:
        execution = await run_agent_system(args, sample, sampling_params, evaluation)
    except RewardFailure as e:
        sample.status = Sample.Status.ABORTED
        sample.metadata["abort_reason"] = f"reward.{e.kind}"
        return sample
    aborted = next((one for one in execution.samples if one.status == Sample.Status.ABORTED), None)
    if not evaluation or aborted:
        return aborted if evaluation and aborted else execution.samples
    selected = execution.chosen or execution.samples[-1]
    selected.reward = execution.chosen.metadata["rule_reward"] if execution.chosen else 0.0
    return selected


def log_agents(
    rollout_id: int, args: Namespace, samples: list[Sample], metrics: dict[str, Any], seconds: float
) -> bool:
    """Log the rule's mean reward of each kind of agent (``--custom-rollout-log-function-path``); keep the rest."""
    found: dict[str, list[float]] = {role: [] for role in ROLES}
    for sample in samples:
        found[sample.metadata["agent"]].append(sample.metadata["rule_reward"])
    means = {f"rollout/multi_agent/{role}": statistics.fmean(rewards) for role, rewards in found.items() if rewards}
    executions = len({sample.rollout_id for sample in samples})
    means["rollout/multi_agent/samples_per_execution"] = len(samples) / executions
    log(args, {**means, "rollout/step": rollout_id}, "rollout/step")
    return False

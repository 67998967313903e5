"""Solvers answer in parallel, rewriters see all answers, a selector picks one of what they wrote."""

from __future__ import annotations

import copy
import random
import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from examples.multi_agent.prompts import PROMPTS, fill
from slime.rollout.cancelling import gather_or_cancel
from slime.rollout.rm_hub import async_rm
from slime.rollout.sglang_rollout import GenerateState, generate
from slime.utils.types import Sample

ROLES = ("solver", "rewriter", "selector")
_JUDGMENT = re.compile(r"Judgment:\s*(\d+)")


@dataclass(frozen=True)
class Settings:
    """The keys of ``--custom-config-path`` that the agents read."""

    num_parallel: int = 5
    """Solvers, and rewriters."""
    correct_reward_weight: float = 1.2
    incorrect_reward_weight: float = 0.8
    """Factors of all rewards of an execution: when the selected solution is right, and otherwise."""
    reasoning_end: str = "</think>"
    """Stands once in an answer that is passed to the next agents, before what they see; "" for models without it."""
    prompts: Mapping[str, str] | None = None

    @classmethod
    def of(cls, args: Namespace) -> Settings:
        """Return what ``args`` sets, and the defaults of the rest."""
        names = ("num_parallel", "correct_reward_weight", "incorrect_reward_weight", "reasoning_end")
        given = {name: getattr(args, name) for name in names if hasattr(args, name)}
        return cls(**given, prompts={**PROMPTS, **getattr(args, "multi_agent_prompts", {})})


@dataclass
class Execution:
    """The agents' answers to one problem."""

    samples: list[Sample]
    chosen: Sample | None = None
    """The rewriter's sample that the selector picked."""


def visible_answer(tokenizer: Any, sample: Sample, reasoning_end: str) -> str | None:
    """Return what other agents see of an answer, without special tokens; None for one that is not passed to them."""
    text = tokenizer.decode(sample.tokens[len(sample.tokens) - sample.response_length :], skip_special_tokens=True)
    if sample.status != Sample.Status.COMPLETED or (reasoning_end and text.count(reasoning_end) != 1):
        return None
    return text.partition(reasoning_end)[2].strip() if reasoning_end else text.strip()


def judgment(text: str, count: int) -> int | None:
    """Return the position of the selected candidate, from 0; None without a number of a candidate."""
    numbers = _JUDGMENT.findall(text)
    return int(numbers[-1]) - 1 if numbers and 1 <= int(numbers[-1]) <= count else None


async def run_agent_system(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Execution:
    """Run the agents on the prompt of ``sample``; return their samples with rewards, in random order.

    Solvers and rewriters have the reward of the rule (``metadata["rule_reward"]``), the selector that of its choice,
    all times a weight. An execution ends early when no answer of a stage is passed on. Aborted samples have no rewards.
    """
    settings = Settings.of(args)
    prompts = settings.prompts or PROMPTS
    tokenizer = GenerateState(args).tokenizer
    problem = sample.prompt if isinstance(sample.prompt, str) else sample.prompt[-1]["content"]
    execution = Execution([])

    async def stage(role: str, count: int, solutions: Sequence[str] = ()) -> list[tuple[Sample, str]]:
        """Ask ``count`` agents; return the samples whose answers are passed on, with what is visible of them."""
        text = fill(prompts, role, problem, solutions)
        asked = [_ask(args, sample, sampling_params, role, text, evaluation) for _ in range(count)]
        made = await gather_or_cancel(asked)
        execution.samples += made
        answers = ((one, visible_answer(tokenizer, one, settings.reasoning_end)) for one in made)
        return [(one, seen) for one, seen in answers if seen is not None]

    solved = await stage("solver", settings.num_parallel)
    rewritten = await stage("rewriter", settings.num_parallel, [seen for _, seen in solved]) if solved else []
    judged = await stage("selector", 1, [seen for _, seen in rewritten]) if rewritten else []
    if judged and (number := judgment(judged[0][1], len(rewritten))) is not None:
        execution.chosen = rewritten[number][0]
    if not any(one.status == Sample.Status.ABORTED for one in execution.samples):
        await _reward(args, settings, execution)
    random.Random(sample.index).shuffle(execution.samples)
    return execution


async def _ask(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], role: str, text: str, evaluation: bool
) -> Sample:
    """Return the sample of one agent that is asked ``text``."""
    one = copy.deepcopy(sample)
    one.prompt = GenerateState(args).tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True,
        **(args.apply_chat_template_kwargs or {}),
    )  # fmt: skip
    one.rollout_id = sample.index
    one.metadata = {**sample.metadata, "agent": role}
    return await generate(args, one, dict(sampling_params), evaluation)


async def _reward(args: Namespace, settings: Settings, execution: Execution) -> None:
    ruled = [one for one in execution.samples if one.metadata["agent"] != "selector"]
    for one, reward in zip(ruled, await gather_or_cancel([async_rm(args, one) for one in ruled]), strict=True):
        one.reward = one.metadata["rule_reward"] = float(reward)
    outcome = execution.chosen.reward if execution.chosen else 0.0
    weight = settings.correct_reward_weight if outcome == 1.0 else settings.incorrect_reward_weight
    for one in execution.samples:
        if one.metadata["agent"] == "selector":
            one.reward = one.metadata["rule_reward"] = outcome
        one.reward = float(one.reward) * weight  # type: ignore[arg-type]

"""The functions that flags name: generation, evaluation, and metrics."""

from __future__ import annotations

import copy
import logging
import statistics
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from examples.tool_orchestra.experts import ServiceFailure, within
from examples.tool_orchestra.func_calls import FunctionCalls
from examples.tool_orchestra.questions import Question
from examples.tool_orchestra.settings import Settings, Task
from slime.observability.logging_utils import log
from slime.rollout.environments.episode import ChatTurns
from slime.rollout.requests.generate_request import tokens_left
from slime.rollout.sglang_rollout import GenerateState, generate_rollout
from slime.rollout.sglang_rollout import generate as generate_turn
from slime.utils.misc import load_function
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

KEY = "orchestra"
"""The entry of a sample's metadata with what is known of its execution."""
NO_CALL = "That was no call of a tool with one of its models."


async def generate(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Return a sample for every turn, of one ``rollout_id``, without rewards; in an evaluation the last, with 1 or 0.

    A turn that is no call is out of the loss, and so are all turns of an execution without an answer. One whose models
    or tools fail is ABORTED, with the reason in ``metadata["abort_reason"]``: it has no reward and is made again.
    """
    settings = Settings.of(args)
    try:
        execution = _execution(args, settings, sample)
        player = Player(args, settings, execution, sample, sampling_params, evaluation)
        try:
            await within(settings.execution_s, player.play())
        finally:
            await execution.close()
    except ServiceFailure as e:
        logger.warning("execution %s is aborted: %s", sample.index, e)
        sample.status = Sample.Status.ABORTED
        sample.metadata = {**(sample.metadata or {}), "abort_reason": f"service: {e}"}
        return sample
    if any(one.status == Sample.Status.ABORTED for one in player.samples):
        sample.status = Sample.Status.ABORTED
        return sample
    spent, task = execution.experts.spent, execution.task
    about = {
        "features": spent.features(task, execution.correct), "preferences": dict(task.preferences),
        "correct": execution.correct, "answered": execution.answered, "turns": player.turns, "calls": dict(spent.calls),
    }  # fmt: skip
    for one in player.samples:
        one.metadata[KEY] = about
        one.remove_sample = one.remove_sample or not execution.answered
    if evaluation:
        within_budget = all(-about["features"][name] <= most for name, most in task.budget.items())
        player.samples[-1].reward = float(execution.correct and within_budget)
        return player.samples[-1]
    return player.samples


def _execution(args: Namespace, settings: Settings, sample: Sample) -> Question | FunctionCalls:
    task = Task.of(sample, settings)
    if task.category == "qa":
        return Question(args, settings, task, sample.label)
    if task.category != "func_call" or not settings.func_call_domain:
        raise ValueError(
            f"the category {task.category!r} of sample {sample.index} needs func_call_domain, a function that makes "
            "the environment; without one only the category qa can be played"
        )
    return FunctionCalls(args, settings, task, load_function(settings.func_call_domain)(args, sample))


@dataclass
class Player:
    """Lets the orchestrator take turns until there is an answer; its samples are in ``samples``."""

    args: Namespace
    settings: Settings
    execution: Question | FunctionCalls
    sample: Sample
    params: dict[str, Any]
    evaluation: bool
    samples: list[Sample] = field(default_factory=list)
    turns: int = 0

    def __post_init__(self) -> None:
        self.tokenizer = GenerateState(self.args).tokenizer
        self.template = self.args.apply_chat_template_kwargs or {}

    async def play(self) -> None:
        """Take turns in the layout of the settings."""
        await self.execution.begin()
        await (self.in_sequence() if self.settings.layout == "sequence" else self.turn_by_turn())

    def _new_sample(self) -> Sample:
        one = copy.deepcopy(self.sample)
        one.rollout_id = self.sample.index
        one.metadata = {**(self.sample.metadata or {}), "turn": self.turns}
        self.samples.append(one)
        return one

    async def turn_by_turn(self) -> None:
        """Make a sample of every turn."""
        while self.turns < self.execution.max_turns and not self.execution.answered:
            messages, tools = self.execution.prompt()
            last = messages[-1]
            last["content"] = shortened(self.tokenizer, last["content"], self.settings.state_tokens)
            one = self._new_sample()
            one.prompt = self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True, **self.template
            )
            await generate_turn(self.args, one, dict(self.params), self.evaluation)
            self.turns += 1
            if one.status == Sample.Status.ABORTED:
                return
            one.remove_sample = not await self.execution.step(one.response)

    async def in_sequence(self) -> None:
        """Make one sample: what a turn adds to what is known is a message of the user, without loss."""
        messages, tools = self.execution.prompt()
        chat, one = ChatTurns(self.tokenizer, tools, self.template), self._new_sample()
        one.tokens = chat.begin(messages)
        while True:
            length, said, known = len(one.tokens), len(one.response), len(self.execution.known)
            one.status = Sample.Status.PENDING
            await generate_turn(self.args, one, dict(self.params), self.evaluation)
            self.turns += 1
            if one.status == Sample.Status.ABORTED:
                return
            action = chat.action(one.tokens[length:], one.response[said:])
            is_call = await self.execution.step(action)
            made = len(one.tokens) - length
            if not is_call:
                mask = one.loss_mask or [1] * one.response_length
                one.loss_mask = [*mask[:-made], *[0] * made]
            if (
                self.execution.answered
                or one.status != Sample.Status.COMPLETED
                or self.turns == self.execution.max_turns
            ):
                return
            added = "\n\n".join(self.execution.known[known:]) if is_call else NO_CALL
            ids, text = chat.observe(action, one.tokens[length:], [{"role": "user", "content": added}])
            if len(ids) >= tokens_left(self.args, one, self.params, self.evaluation):
                return
            one.append_response_tokens(self.args, tokens=ids, text=text, trainable=False)


def shortened(tokenizer: Any, text: str, limit: int) -> str:
    """Return a text of at most ``limit`` tokens: its end is left out."""
    if len(text) <= limit:  # a token has a character at least
        return text
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return text if len(tokens) <= limit else str(tokenizer.decode(tokens[:limit]))


def evaluate(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = True) -> Any:
    """Evaluate single executions (``--eval-function-path``): whether the answer is right, within the row's budget."""
    alone = copy.copy(args)
    alone.group_rm = False
    return generate_rollout(alone, rollout_id, data_source, evaluation=True)


def log_executions(
    rollout_id: int, args: Namespace, samples: list[Sample], metrics: dict[str, Any], seconds: float
) -> bool:
    """Log what executions cost (``--custom-rollout-log-function-path``); keep the rest."""
    found = summary({sample.rollout_id: sample.metadata[KEY] for sample in samples}.values())
    log(args, {**{f"rollout/orchestra/{k}": v for k, v in found.items()}, "rollout/step": rollout_id}, "rollout/step")
    return False


def log_evaluation(rollout_id: int, args: Namespace, data: dict[str, Any], metrics: dict[str, Any] | None) -> bool:
    """Log what executions of an evaluation cost (``--custom-eval-rollout-log-function-path``); keep the rest."""
    for name, result in data.items():
        found = summary([sample.metadata[KEY] for sample in result["samples"]])
        log(args, {**{f"eval/{name}/{k}": v for k, v in found.items()}, "eval/step": rollout_id}, "eval/step")
    return False


def summary(executions: Any) -> dict[str, float]:
    """Return means over executions: accuracy, cost, latency (s), turns, and calls of every model."""
    each: Sequence[dict[str, Any]] = list(executions)
    means = {"turns": statistics.fmean(one["turns"] for one in each)}
    for name in ("accuracy", "cost", "latency"):
        sign = 1.0 if name == "accuracy" else -1.0
        means[name] = statistics.fmean(sign * one["features"][name] for one in each)
    for alias in sorted({alias for one in each for alias in one["calls"]}):
        means[f"calls/{alias}"] = statistics.fmean(one["calls"].get(alias, 0) for one in each)
    return means

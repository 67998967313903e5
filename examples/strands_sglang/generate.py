"""Let an agent of Strands Agents solve a problem, and train on the tokens that it has recorded."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from examples.retool.environment import score
from examples.retool.interpreter import interpret
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.sampling import limited
from slime.utils.types import Sample

PACKAGES = "strands-agents==1.62.0 strands-sglang==0.4.3"
missing: ImportError | None = None
try:
    from strands import Agent, tool
    from strands.types.exceptions import (
        ContextWindowOverflowException,
        EventLoopException,
        MaxTokensReachedException,
    )
    from strands_sglang import LoopLimiter, LoopLimitReachedError, SGLangModel, get_client_from_slime_args
except ImportError as e:  # flags can be checked without them
    missing = e

logger = logging.getLogger(__name__)


def require_packages() -> None:
    """Raise ImportError, with what to install, where Strands Agents or its model provider is missing."""
    if missing is not None:
        what = f"{__name__} needs Strands Agents and its model provider: pip install {PACKAGES}"
        raise ImportError(f"{what} ({missing})") from missing


@dataclass(frozen=True)
class Settings:
    """The keys of ``strands`` in the file of ``--custom-config-path``."""

    max_tool_iters: int = 5
    """Turns with calls."""
    system_prompt: str | None = None
    cpu_s: float = 20.0
    memory_gib: float = 4.0
    request_s: float = 300.0
    binary: bool = False
    """Rewards of 1 and 0, in the place of those of retool."""

    @classmethod
    def of(cls, args: Namespace) -> Settings:
        return cls(**getattr(args, "strands", {}))


class ResponseFull(Exception):
    """No token is left of ``--rollout-max-response-len``."""


class Interrupted(Exception):
    """The engine aborted a request."""


@dataclass
class RecordingClient:
    """The client of one execution: the shared one, with a limit on the whole response; keeps engines' answers."""

    client: Any
    limit: int
    answers: list[dict[str, Any]] = field(default_factory=list)
    prompt_length: int | None = None

    async def is_multimodal(self) -> bool:
        return False

    async def generate(self, input_ids: list[int], **request: Any) -> dict[str, Any]:
        """Return the engine's answer. Raises ResponseFull and Interrupted."""
        if self.prompt_length is None:
            self.prompt_length = len(input_ids)
        made = len(input_ids) - self.prompt_length
        left = self.limit - made
        if left < 1:
            raise ResponseFull
        request["sampling_params"] = limited(request["sampling_params"], left, made)
        answer: dict[str, Any] = await self.client.generate(input_ids=input_ids, **request)
        if answer["meta_info"]["finish_reason"]["type"] == "abort":
            raise Interrupted
        self.answers.append(answer)
        return answer


def interpreter(settings: Settings, failures: list[Exception]) -> Callable[..., Any]:
    """Return the tool; what is not the model's fault goes to ``failures``, for tools' errors are shown to the model."""

    @tool
    async def code_interpreter(code: str) -> str:
        """Run Python code and return what it prints.

        Args:
            code: Python 3 code that prints results
        """
        try:
            memory = int(settings.memory_gib * 2**30)
            return (await interpret(code, cpu_s=settings.cpu_s, memory_bytes=memory))[0]
        except Exception as e:
            failures.append(e)
            raise

    return code_interpreter


async def generate(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample:
    """Return the sample with the agent's tokens, loss masks and log-probs (``--custom-generate-function-path``).

    The limits of turns, tokens and context make it TRUNCATED. Whatever else the agent, the engine or a tool raises
    makes it ABORTED, without a reward and out of the loss. The prompt is a text, or messages of which the last is the
    user's and a first one may be the system's.
    """
    require_packages()
    settings, failures = Settings.of(args), []
    tokenizer = GenerateState(args).tokenizer
    shared = get_client_from_slime_args(args, timeout=settings.request_s)
    client = RecordingClient(shared, sampling_params["max_new_tokens"])
    model = SGLangModel(client=client, tokenizer=tokenizer, sampling_params=sampling_params)  # type: ignore[arg-type]
    system, question = prompt_of(sample, settings)
    agent = Agent(
        model=model, tools=[interpreter(settings, failures)], system_prompt=system, callback_handler=None,
        hooks=[LoopLimiter(max_tool_iters=settings.max_tool_iters)],
    )  # fmt: skip
    cut = False
    try:
        await agent.invoke_async(question)
    except Exception as e:  # noqa: BLE001  (it aborts the sample, with the reason)
        reason = e.original_exception if isinstance(e, EventLoopException) else e
        limits = (LoopLimitReachedError, MaxTokensReachedException, ContextWindowOverflowException, ResponseFull)
        cut = isinstance(reason, limits)
        if not cut:
            failures.append(reason)
    if failures or not client.answers:
        why = repr(failures[0]) if failures else "the prompt is too long"
        logger.warning("execution %s is aborted: %s", sample.index, why)
        sample.status = Sample.Status.ABORTED
        sample.metadata = {**(sample.metadata or {}), "abort_reason": f"strands: {why}"}
        return sample
    take_tokens(args, sample, model.rollout, client.answers, tokenizer)
    sample.status = Sample.Status.TRUNCATED if cut else Sample.Status.COMPLETED
    sample.metadata = {**(sample.metadata or {}), "tool_iters": len(client.answers) - (not cut)}
    return sample


def prompt_of(sample: Sample, settings: Settings) -> tuple[str | None, str]:
    """Return the message of the system, and the user's."""
    if isinstance(sample.prompt, str):
        return settings.system_prompt, sample.prompt
    first, last = sample.prompt[0], sample.prompt[-1]
    return (first["content"] if first["role"] == "system" else settings.system_prompt), last["content"]


def take_tokens(args: Namespace, sample: Sample, rollout: Any, answers: list[dict[str, Any]], tokenizer: Any) -> None:
    """Write what a Strands ``Rollout`` has recorded into the sample; ``answers`` are the engine's, one per turn."""
    position = rollout.initial_prompt_length
    sample.tokens = list(rollout.token_ids[:position])
    turns = iter(answers)
    for is_output, length in rollout.segment_info[1:]:
        tokens = rollout.token_ids[position : position + length]
        sample.append_response_tokens(
            args,
            tokens=tokens,
            log_probs=rollout.logprobs[position : position + length] if is_output else None,
            trainable=is_output,
            meta_info=next(turns)["meta_info"] if is_output else None,
            text=tokenizer.decode(tokens),
        )
        position += length


async def reward_func(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """Return the reward of retool for the boxed answer at the end (``--custom-rm-path``), or with ``binary`` 1 or 0."""
    found = score(sample.response, sample.label, sample.metadata["tool_iters"])
    return float(found > 0) if Settings.of(args).binary else found

"""``--custom-generate-function-path slime.rollout.environments.generate``: one episode of one sample.

The engine's turns come from ``slime.rollout.sglang_rollout.generate``. The episode is made on a copy of the sample,
which takes its place when it is complete: one that fails or is cancelled leaves the sample as it was drawn.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from slime.arguments.args import Args
from slime.arguments.files.environments import EnvironmentEntry, environments_of
from slime.rollout import sglang_rollout
from slime.rollout.cancelling import CANCEL_GRACE_S
from slime.rollout.environments.environment import Environment, Messages, Step, task_of
from slime.rollout.groups import without_response
from slime.rollout.hooks.hook import in_thread, is_coroutine_function, place_of
from slime.rollout.outages import AwaitedService, is_of_service, with_users_line
from slime.rollout.requests.generate_request import tokens_left
from slime.rollout.requests.images import add_images, images_of, set_train_inputs
from slime.utils.chat_messages import has_media, media_messages
from slime.utils.image_tokens import PlacesError, WithImages
from slime.utils.misc import load_function
from slime.utils.processing_utils import process_vision_info
from slime.utils.types import Sample
from slime.utils.user_code import users_traceback

logger = logging.getLogger(__name__)
T = TypeVar("T")

EVAL_ATTEMPTS = 3
"""An evaluation needs every sample: an episode that fails begins again, then the run stops."""
CLOSE_S = CANCEL_GRACE_S - 1
ADVICE = ". For what the model did wrong return an observation, or raise slime.rollout.environments.ToolError in a tool"

_failures: Counter[str] = Counter()
_template_warned: set[str] = set()


class EnvironmentFailure(Exception):
    """An environment that raised or took too long. ``reason`` is ``<environment>.<method>.<type of the error>``."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


async def generate(args: Args, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    """Play an episode of the sample's environment and return the sample, with its reward.

    The engine's tokens have loss mask 1, all others 0. A failure of the environment makes the sample ABORTED, with
    ``metadata["abort_reason"]`` and ``["abort_error"]``; in an evaluation it is raised after ``EVAL_ATTEMPTS``.
    """
    entry = entry_of(args, sample)
    service = AwaitedService(f"environment {entry.name!r}", args.service_outage_timeout)
    for attempt in itertools.count(1):
        try:
            played = await Episode(args, entry, sample, evaluation).play(sampling_params)
        except EnvironmentFailure as e:
            _log(sample, e)
            if not evaluation:
                sample.status = Sample.Status.ABORTED
                sample.metadata = {**(sample.metadata or {}), "abort_reason": e.reason, "abort_error": str(e)}
                return sample
            if attempt >= EVAL_ATTEMPTS:
                if not isinstance(e.__cause__, Exception) or not is_of_service(e.__cause__):
                    raise
                service.hold(0, e.__cause__)
                service.is_down = True
                await service.another_try(0, e)
            continue
        if played.status == Sample.Status.ABORTED:  # the rollout ends
            sample.status = Sample.Status.ABORTED
        else:
            sample.__dict__.update(played.__dict__)
        return sample
    raise AssertionError("every attempt returns or raises")


def _log(sample: Sample, error: EnvironmentFailure) -> None:
    """Log the first failure of a reason, with the lines of the user's code; ``rollout/aborted/<reason>`` counts all."""
    _failures[error.reason] += 1
    if _failures[error.reason] == 1:
        logger.error(
            "sample index=%s group_index=%s, the first failure of its kind (rollout/aborted/%s counts all): %s\n%s",
            sample.index, sample.group_index, error.reason, error, users_traceback(error.__cause__ or error),
        )  # fmt: skip


def entry_of(args: Args, sample: Sample) -> EnvironmentEntry:
    """Return the environment that ``metadata["environment"]`` names; without a name the run's only one."""
    entries = environments_of(args)
    name = (sample.metadata or {}).get("environment")
    if name is None and len(entries) == 1:
        return next(iter(entries.values()))
    if name not in entries:
        said = "names none" if name is None else f"names {name!r}"
        raise ValueError(
            f'sample index={sample.index}: metadata["environment"] {said}, expected one of {", ".join(entries)}; '
            "--data-source-path slime.rollout.environments.EnvironmentDataSource draws one by weight"
        )
    return entries[name]


class Episode:
    """One attempt at one sample."""

    def __init__(self, args: Args, entry: EnvironmentEntry, sample: Sample, evaluation: bool) -> None:
        self.args, self.entry, self.evaluation = args, entry, evaluation
        self.sample = without_response(sample)
        self.sample.session_id = sample.session_id
        self.sample.trace = sample.trace  # open spans are closed in it
        self.sample.tokens = []
        for name in ("abort_reason", "abort_error"):
            self.sample.metadata.pop(name, None)
        self.reward = 0.0
        self.turns = self.tool_calls = self.tool_errors = 0
        self.as_rendered = True
        self.reader: WithImages | None = None

    async def play(self, sampling_params: dict[str, Any]) -> Sample:
        """Return the sample of the episode. Raises EnvironmentFailure."""
        bounds = self.entry.difficulty
        task = task_of(self.sample, self.entry.name, bounds.start if bounds else 0, self.entry.options, self.evaluation)
        kind = load_function(self.entry.path, "--environment-path")
        environment = await self._call("__init__", kind, self.args, task)
        if not isinstance(environment, Environment):
            raise TypeError(
                f"environment {self.entry.path!r} ({place_of(kind)}) made {type(environment).__name__}, expected a "
                "slime.rollout.environments.Environment"
            )
        try:
            await self._play(environment, sampling_params)
        finally:
            await self._close(environment)
        return self._finished()

    async def _play(self, environment: Environment, sampling_params: dict[str, Any]) -> None:
        sample, args = self.sample, self.args
        turns = await self._begin(environment)
        done = False
        while not done and self.turns < self.entry.max_turns:
            length, said = len(sample.tokens), len(sample.response)
            sample.status = Sample.Status.PENDING
            await sglang_rollout.generate(args, sample, sampling_params, self.evaluation)
            if sample.status == Sample.Status.ABORTED:
                return
            self.turns += 1
            if sample.status != Sample.Status.COMPLETED:
                break
            tokens, text = sample.tokens[length:], sample.response[said:]
            turns.text += text
            action = turns.action(tokens, text)
            step = await self._step(environment, action)
            done = step.done
            if done or self.turns == self.entry.max_turns:
                break
            found = await self._call("format_observation", environment.format_observation, step.observation)
            seen, images = await self._show("format_observation", [found] if isinstance(found, dict) else found)
            try:
                ids, text = await self._tokenized(turns.observe, action, tokens, seen)
            except PlacesError as e:  # a tool may answer what the model, or a page of the web, has written
                reason = f"{self.entry.name}.format_observation.{type(e).__name__}"
                raise EnvironmentFailure(reason, f"environment {self.entry.name!r}, format_observation: {e}") from e
            left = tokens_left(args, sample, sampling_params, self.evaluation)
            if len(ids) >= left:  # no room for another turn
                break
            sample.append_response_tokens(args, tokens=ids, text=text, trainable=False)
            if self.reader is not None:
                add_images(sample, images, self.reader.inputs)
            turns.text += text
            self._compare(turns)
        if not done:
            sample.status = Sample.Status.TRUNCATED
            self.reward += await self._call("cut_off", environment.cut_off)

    async def _begin(self, environment: Environment) -> ChatTurns:
        sample = self.sample
        prompt = await self._call("reset", environment.reset)
        prompt = sample.prompt if prompt is None else prompt
        if not prompt:
            raise ValueError(
                f"environment {self.entry.name!r}: reset returned no prompt and sample index={sample.index} has none; "
                "return messages, or give --prompt-data"
            )
        sample.prompt = sample.prompt or prompt
        schemas = environment.tools.schemas() if environment.tools is not None else None
        kwargs = self.args.apply_chat_template_kwargs or {}
        state = sglang_rollout.GenerateState(self.args)
        self.reader = WithImages(state) if getattr(state, "processor", None) is not None else None
        turns = ChatTurns(self.reader or state.tokenizer, schemas, kwargs)
        had = images_of(sample)
        if prompt is sample.prompt and had and self.reader is not None:
            images = self.reader.show(had)
        else:
            prompt, images = await self._show("reset", prompt)
        if images or had:
            sample.multimodal_inputs = {**(sample.multimodal_inputs or {}), "images": images}
        sample.tokens = await self._tokenized(turns.begin, prompt)
        if self.reader is not None:
            set_train_inputs(sample, self.reader.inputs)
        return turns

    async def _show(self, method: str, said: str | Messages) -> tuple[str | Messages, list[Any]]:
        """Return messages as templates take them, and their images, which the text has that comes next."""
        images: list[Any] = []
        if not isinstance(said, str) and any(map(has_media, said)):
            if self.reader is None:
                raise ValueError(
                    f"environment {self.entry.name!r}, {method}: there is an image in a message, and no processor is "
                    "loaded for images: give --multimodal-keys, and a checkpoint that has one"
                )
            processor = sglang_rollout.GenerateState(self.args).processor
            images = (await self._call(method, process_vision_info, said, processor))["images"] or []
            said = media_messages(said, method)
        return said, images if self.reader is None else self.reader.show(images)

    async def _tokenized(self, function: Callable[..., T], *arguments: object) -> T:
        """Call a function that tokenizes; in a thread where images may be among it."""
        return function(*arguments) if self.reader is None else await in_thread(function, *arguments)

    async def _step(self, environment: Environment, action: str) -> Step:
        step = await self._call("step", environment.step, action)
        if not isinstance(step, Step):
            raise TypeError(
                f"environment {self.entry.name!r} ({place_of(type(environment))}): step returned "
                f"{type(step).__name__}, expected a slime.rollout.environments.Step"
            )
        self.reward += step.reward
        self.tool_calls += step.tool_calls
        self.tool_errors += step.tool_errors
        return step

    async def _call(self, method: str, function: Callable[..., Any], *arguments: object) -> Any:
        """Call a method within ``step_timeout``; EnvironmentFailure for what it raises. Its time is counted."""
        limit, began = self.entry.step_timeout, time.monotonic()
        where = f"environment {self.entry.name!r}, {method}" + (f" after turn {self.turns}" if self.turns else "")
        try:
            async with asyncio.timeout(limit) as scope:
                return await _result_of(function, *arguments)
        except NotImplementedError:
            raise
        except TimeoutError as e:
            said = f"took more than {limit:g} s (step_timeout)" if scope.expired() else f"raised {e!r}"
            raise EnvironmentFailure(f"{self.entry.name}.{method}.TimeoutError", f"{where} {said}") from e
        except Exception as e:
            advice = "" if is_of_service(e) else ADVICE
            raise EnvironmentFailure(
                f"{self.entry.name}.{method}.{type(e).__name__}", f"{where} raised {with_users_line(e)}{advice}"
            ) from e
        finally:
            self.sample.non_generation_time += time.monotonic() - began

    async def _close(self, environment: Environment) -> None:
        """Close it; what goes wrong is logged, since the episode is over."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await _result_of(environment.close)
        except Exception as e:  # noqa: BLE001  (anything that a user's close raises)
            logger.warning("environment %r, close: %r", self.entry.name, e)

    def _compare(self, turns: ChatTurns) -> None:
        """Say once where the chat template would write earlier turns in another way than they were generated."""
        self.as_rendered = self.as_rendered and turns.is_as_rendered()
        if not self.as_rendered and self.entry.name not in _template_warned:
            _template_warned.add(self.entry.name)
            logger.warning(
                "environment %r: the chat template writes the conversation in another way than it was generated (it "
                "may leave earlier reasoning out). Engine and trainer have the tokens as they were generated; what "
                "serves the model later may render others", self.entry.name,
            )  # fmt: skip

    def _finished(self) -> Sample:
        sample = self.sample
        if sample.status == Sample.Status.ABORTED:
            return sample
        keys = [key for key in (self.args.reward_key, self.args.eval_reward_key) if key]
        sample.reward = dict.fromkeys(keys, self.reward) if keys else self.reward
        sample.metadata = {**sample.metadata, "environment": self.entry.name, "round_number": self.turns}
        sample.environment_episode = {  # type: ignore[attr-defined]  # a further attribute, for environment/* metrics
            "environment": self.entry.name,
            "difficulty": sample.metadata.get("difficulty"),
            "reward": self.reward,
            "success": self.reward >= self.entry.success_reward,
            "turns": self.turns,
            "tool_calls": self.tool_calls,
            "tool_errors": self.tool_errors,
            "seconds": sample.non_generation_time,
            "rewritten_by_template": not self.as_rendered,
        }
        return sample


async def _result_of(function: Callable[..., Any], *arguments: object) -> Any:
    """Call a coroutine function on the event loop, a plain one in a thread; an awaitable that it returns is awaited."""
    if is_coroutine_function(function):
        return await function(*arguments)
    result = await in_thread(function, *arguments)
    return await result if inspect.isawaitable(result) else result


MARKER = "\u2039slime-turn\u203a"


class ChatTurns:
    """One conversation, from messages to tokens, turn by turn, without ever tokenizing again what the engine generated.

    The tokens that the engine saw and made are the truth. Of the chat template only the text between the model's
    message and its next one is taken: it is rendered after a marker in the place of the model's message, and tokenized
    by itself. ``tokenizer`` has ``encode``, ``decode``, ``apply_chat_template`` and ``all_special_ids``.
    """

    def __init__(self, tokenizer: Any, tools: list[dict[str, Any]] | None, template_kwargs: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._kwargs = {**template_kwargs, **({"tools": tools} if tools else {})}
        self._special = set(tokenizer.all_special_ids)
        self._messages: Messages | None = None
        self._said = ""
        """The text of the model's message since it began: earlier actions, and observations that are texts."""
        self.text = ""
        """Everything so far, as text."""

    def begin(self, prompt: str | Messages) -> list[int]:
        """Return the token ids of the prompt: a text as it is, or messages and the beginning of the model's one."""
        if isinstance(prompt, str):
            self._messages, self.text = None, prompt
        else:
            self._messages, self.text = list(prompt), self._render(prompt, opens=True)
        return self._encode(self.text)

    def action(self, tokens: list[int], text: str) -> str:
        """Return ``text``, which the engine's ``tokens`` decode to, without the special tokens at their end."""
        end = len(tokens)
        while end and tokens[end - 1] in self._special:
            end -= 1
            text = text.removesuffix(self._tokenizer.decode([tokens[end]], skip_special_tokens=False))
        return text

    def observe(self, said: str, tokens: list[int], observation: str | Messages) -> tuple[list[int], str]:
        """Return ids and text of what follows the model's turn, whose action was ``said`` and ``tokens`` end.

        Of a text that is the text itself. Of messages: the rest of the model's message, the messages, and the beginning
        of its next one. Raises ValueError for a template that does not write what the model generated.
        """
        if isinstance(observation, str):
            self._said = self._said + said + observation
            return self._encode(observation), observation
        history = self._messages if self._messages is not None else [{"role": "user", "content": ""}]
        marked = {"role": "assistant", "content": MARKER}
        closing = self._encode(self._after_marker([*history, marked], opens=False))
        ids = self._encode(self._after_marker([*history, marked, *observation], opens=True))
        written = _overlap(tokens, ids, at_most=_common_prefix(closing, ids))
        if self._messages is not None:
            content = self._said + said
            self._messages = [*self._messages, {"role": "assistant", "content": content}, *observation]
        self._said = ""
        return ids[written:], self._tokenizer.decode(ids[written:], skip_special_tokens=False)

    def is_as_rendered(self) -> bool:
        """True when ``text`` is what the template makes of the messages; also where that cannot be determined."""
        if self._messages is None or self._said:
            return True
        return self._render(self._messages, opens=True) == self.text

    def _render(self, messages: Messages, *, opens: bool) -> str:
        rendered = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=opens, **self._kwargs
        )
        return str(rendered)

    def _after_marker(self, messages: Messages, *, opens: bool) -> str:
        before, found, after = self._render(messages, opens=opens).rpartition(MARKER)
        if not found:
            raise ValueError(
                "the chat template does not write the content of the assistant's last message as it is, so the tokens "
                f"after it cannot be separated: of a message {MARKER!r} it made {before[-200:] or after[-200:]!r}; let "
                "format_observation return a text, or use another --chat-template"
            )
        return after

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def _common_prefix(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _overlap(tokens: list[int], ids: list[int], at_most: int) -> int:
    """Return how many of the first ``ids``, ``at_most`` of them, ``tokens`` end with already."""
    longest = min(at_most, len(tokens))
    return next((n for n in range(longest, 0, -1) if tokens[-n:] == ids[:n]), 0)

"""Several turns with an environment that may show images (``--custom-generate-function-path``).

The file of ``--custom-config-path`` has ``rollout_interaction_env_path``, a module with ``build_env(sample=, args=)``,
and ``max_turns``. The environment's methods are ``reset() -> (observation, info)``,
``step(text) -> (observation, done, info)``, ``format_observation(observation) -> message`` and ``close()``. Images are
parts ``{"type": "image", "image": ...}`` of the message's content.
"""

from __future__ import annotations

import asyncio
import re
from argparse import Namespace
from typing import Any

import torch

from slime.rollout.environments.episode import ChatTurns
from slime.rollout.requests.generate_request import (
    Resumes,
    append_output,
    prompt_token_ids,
    routing_headers,
    tokens_left,
)
from slime.rollout.sglang_rollout import GenerateState, get_model_url
from slime.utils.http_utils import post
from slime.utils.misc import load_function
from slime.utils.processing_utils import build_processor_kwargs, encode_image_for_rollout_engine, process_vision_info
from slime.utils.sampling import limited
from slime.utils.types import Sample

IMAGE = "<|image_pad|>"
NOT_OF_THE_MODEL = ("input_ids", "attention_mask")


class _WithImages:
    """A tokenizer that lets the processor tokenize text with images in it: one pad becomes as many as its patches."""

    def __init__(self, tokenizer: Any, processor: Any) -> None:
        self.tokenizer, self.processor = tokenizer, processor
        self.image = getattr(processor, "image_token", IMAGE)
        self.shown: list[Any] = []
        """The images of the text that comes next."""
        self.train_inputs: dict[str, torch.Tensor] = {}
        """What the processor made of them."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        if self.image not in text:
            return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))
        outputs = self.processor(text=text, **build_processor_kwargs({"images": self.shown}))
        self.train_inputs = {key: value for key, value in outputs.items() if key not in NOT_OF_THE_MODEL}
        return list(outputs["input_ids"][0])


class Conversation:
    """The turns of one sample, from messages and images to tokens and requests."""

    def __init__(self, args: Namespace, sample: Sample) -> None:
        state = GenerateState(args)
        if state.processor is None:
            raise ValueError(
                f"{args.hf_checkpoint} has no processor of images, or --multimodal-keys is not given; this generate "
                "function needs both"
            )
        self.args, self.state, self.sample = args, state, sample
        self.tokenizer = _WithImages(state.tokenizer, state.processor)
        self.pad = int(state.tokenizer.convert_tokens_to_ids(self.tokenizer.image))
        sample.tokens = prompt_token_ids(state, sample)
        self.turns = ChatTurns(self.tokenizer, None, {})
        images = (sample.multimodal_inputs or {}).get("images") or []
        self.encoded = [encode_image_for_rollout_engine(image) for image in images]

    def collapsed(self) -> list[int]:
        """Return the tokens with one pad for each image: engines expand them, and do not answer what is expanded."""
        tokens = self.sample.tokens
        return [token for i, token in enumerate(tokens) if token != self.pad or i == 0 or tokens[i - 1] != self.pad]

    async def ask(self, sampling_params: dict[str, Any], evaluation: bool) -> None:
        """Let the engine take a turn; the sample's status is then that of the turn."""
        args, sample = self.args, self.sample
        sample.status = Sample.Status.PENDING
        resumes = Resumes(self.state, sample)
        while (left := tokens_left(args, sample, sampling_params, evaluation)) > 0:
            payload = {
                "input_ids": self.collapsed(),
                "sampling_params": limited(sampling_params, left, sample.response_length),
                "return_logprob": True,
            }
            if self.encoded:
                payload["image_data"] = list(self.encoded)
            output = await post(get_model_url(args, "default"), payload, headers=routing_headers(args, sample))
            append_output(args, sample, output)
            if not await resumes.needed():
                return
        sample.status = Sample.Status.TRUNCATED

    def show(self, action: str, tokens: list[int], message: dict[str, Any], room: int) -> bool:
        """Append an observation without loss, with its images; return False when ``room`` tokens are too few.

        ``action`` is what the model said in its turn, ``tokens`` are those of the turn.
        """
        sample = self.sample
        images = process_vision_info([message], self.state.processor)["images"] or []
        self.tokenizer.shown, self.tokenizer.train_inputs = images, {}
        ids, text = self.turns.observe(action, tokens, [message])
        if len(ids) >= room:
            return False
        text = re.sub(f"(?:{re.escape(self.tokenizer.image)})+", lambda found: self.tokenizer.image, text)
        sample.append_response_tokens(self.args, tokens=ids, text=text, trainable=False)
        if images:
            before = sample.multimodal_inputs or {}  # which the samples of a group share
            sample.multimodal_inputs = {**before, "images": [*(before.get("images") or []), *images]}
            self.encoded += [encode_image_for_rollout_engine(image) for image in images]
            sample.multimodal_train_inputs = joined(sample.multimodal_train_inputs or {}, self.tokenizer.train_inputs)
        return True


def joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return what the processor made of earlier and of later images: tensors, one after the other by name."""
    return {
        key: torch.cat([inputs[key] for inputs in (one, other) if key in inputs])
        for key in dict.fromkeys([*one, *other])
    }


async def generate(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample:
    """Play an episode of the environment; tokens of observations have loss mask 0.

    An episode that is not done after ``max_turns``, or has no room for another turn, is TRUNCATED.
    """
    build_env = load_function(f"{args.rollout_interaction_env_path}.build_env")
    environment = await asyncio.to_thread(build_env, sample=sample, args=args)
    try:
        await asyncio.to_thread(environment.reset)
        return await _play(args, sample, sampling_params, evaluation, environment)
    finally:
        await asyncio.to_thread(environment.close)


async def _play(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool, environment: Any
) -> Sample:
    conversation = Conversation(args, sample)
    for turn in range(1, args.max_turns + 1):
        start, said = len(sample.tokens), len(sample.response)
        await conversation.ask(sampling_params, evaluation)
        if sample.status != Sample.Status.COMPLETED:
            return sample
        sample.metadata = {**(sample.metadata or {}), "round_number": turn}
        tokens = sample.tokens[start:]
        if conversation.pad in tokens:  # it would stand for an image that is not there
            break
        action = conversation.turns.action(tokens, sample.response[said:])
        observation, done, _ = await asyncio.to_thread(environment.step, action)
        if done:
            return sample
        room = tokens_left(args, sample, sampling_params, evaluation)
        if turn == args.max_turns or not conversation.show(
            action, tokens, environment.format_observation(observation), room
        ):
            break
    sample.status = Sample.Status.TRUNCATED
    return sample

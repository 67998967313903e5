"""Several turns with an environment that may show images (``--custom-generate-function-path``).

The file of ``--custom-config-path`` has ``rollout_interaction_env_path``, a module with ``build_env(sample=, args=)``,
and ``max_turns``. The environment's methods are ``reset() -> (observation, info)``,
``step(text) -> (observation, done, info)``, ``format_observation(observation) -> message`` and ``close()``. Images are
parts ``{"type": "image", "image": ...}`` of the message's content.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import Any

from slime.rollout.environments.episode import ChatTurns
from slime.rollout.requests.generate_request import prompt_token_ids, tokens_left
from slime.rollout.requests.images import add_images
from slime.rollout.sglang_rollout import GenerateState
from slime.rollout.sglang_rollout import generate as generate_turn
from slime.utils.image_tokens import WithImages
from slime.utils.misc import load_function
from slime.utils.processing_utils import process_vision_info
from slime.utils.types import Sample


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
        self.tokenizer = WithImages(state)
        sample.tokens = prompt_token_ids(state, sample)
        self.turns = ChatTurns(self.tokenizer, None, {})

    async def ask(self, sampling_params: dict[str, Any], evaluation: bool) -> None:
        """Let the engine take a turn; the sample's status is then that of the turn."""
        self.sample.status = Sample.Status.PENDING
        await generate_turn(self.args, self.sample, sampling_params, evaluation)

    def show(self, action: str, tokens: list[int], message: dict[str, Any], room: int) -> bool:
        """Append an observation without loss, with its images; return False when ``room`` tokens are too few.

        ``action`` is what the model said in its turn, ``tokens`` are those of the turn.
        """
        sample = self.sample
        images = process_vision_info([message], self.state.processor)["images"] or []
        self.tokenizer.show(images)
        ids, text = self.turns.observe(action, tokens, [message])
        if len(ids) >= room:
            return False
        sample.append_response_tokens(self.args, tokens=ids, text=text, trainable=False)
        add_images(sample, images, self.tokenizer.inputs)
        return True


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

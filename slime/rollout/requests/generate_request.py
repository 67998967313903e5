"""The requests of a sample to an engine, and what is taken from the replies."""

from __future__ import annotations

import asyncio
import logging
from functools import cache
from typing import TYPE_CHECKING, Any

from slime.arguments.args import Args
from slime.arguments.errors import ArgumentError
from slime.arguments.files.sglang_config import read as read_sglang_config
from slime.arguments.rules.hf_config import read_config
from slime.models import hf_fields
from slime.rollout.requests.generate_state import bookkeeping_of, replays_top_p
from slime.rollout.requests.images import check_prompt, check_sampled, request_fields, set_train_inputs
from slime.servers.engine_replies import output_tokens
from slime.utils.image_tokens import expanded, forbidden_ids, without_placeholders
from slime.utils.sampling import asked_fields, limited
from slime.utils.types import Sample

if TYPE_CHECKING:
    from slime.rollout.requests.generate_state import RequestState

logger = logging.getLogger(__name__)


MAX_RESUMES_WITHOUT_PROGRESS = 20
_BROKEN_CHARACTER = "\ufffd"
RESUME_PAUSE_S = 0.2


class Resumes:
    """Decides if ``sample`` needs another request after one that ended.

    An abort that was not requested here (engines abort for a weight sync) is resumed from the tokens that were made.
    Raises AssertionError for a sample that is not PENDING or ABORTED.
    """

    def __init__(self, state: RequestState, sample: Sample) -> None:
        assert sample.status in (Sample.Status.PENDING, Sample.Status.ABORTED), (
            f"sample index={sample.index} cannot be generated from status {sample.status}"
        )
        if not sample.tokens:
            sample.tokens = prompt_token_ids(state, sample)
        self._state, self._sample = state, sample
        self._length, self._stalled = sample.response_length, 0

    async def needed(self) -> bool:
        """Return whether to send another request, after a pause. Raises RuntimeError when none makes a token."""
        sample = self._sample
        check_sampled(self._state, sample, sample.tokens[len(sample.tokens) - self._new_tokens() :])
        if sample.status != Sample.Status.ABORTED or self._state.aborted:
            self._length = sample.response_length
            return False
        self._stalled = 0 if sample.response_length > self._length else self._stalled + 1
        self._length = sample.response_length
        if self._stalled > MAX_RESUMES_WITHOUT_PROGRESS:
            raise RuntimeError(
                f"the engines aborted sample index={sample.index} {self._stalled} times without generating a token "
                "that can be used, and no abort was requested here; see the engine logs"
            )
        await asyncio.sleep(RESUME_PAUSE_S)
        return True

    def _new_tokens(self) -> int:
        return max(0, self._sample.response_length - self._length)


def generate_payload(
    args: Args,
    sample: Sample,
    sampling_params: dict[str, Any],
    evaluation: bool,
    state: RequestState | None = None,
) -> dict[str, Any] | None:
    """Return the body of the request for the rest of ``sample``; None, and status TRUNCATED, when nothing is left.

    A prompt that leaves no room at all takes its sample out of training, with a warning. ``state`` has the processor,
    without which samples with images are refused.
    """
    left = tokens_left(args, sample, sampling_params, evaluation)
    assert left >= 0, (
        f"sample index={sample.index} has {sample.response_length} response tokens, "
        f"{-left} more than max_new_tokens allows"
    )
    if left == 0:
        sample.status = Sample.Status.TRUNCATED
        if sample.response_length == 0:
            sample.remove_sample = True
            logger.warning(
                "sample index=%s is left out of training: its prompt of %d tokens leaves no room for a response",
                sample.index, len(sample.tokens),
            )  # fmt: skip
        return None
    params = limited(sampling_params, left, sample.response_length)
    payload: dict[str, Any] = {"sampling_params": params, "return_logprob": True}
    payload.update(request_fields(state, sample))
    asked = []  # what the trainer replays
    if args.use_rollout_routing_replay and not evaluation:
        asked.append("return_routed_experts")
    if replays_top_p(args) and not evaluation:
        asked.append("return_sampling_mask")
    payload.update(asked_fields(asked))
    return without_placeholders(payload, forbidden_ids(state))


def routing_headers(args: Args, sample: Sample) -> dict[str, str] | None:
    """Return the header that keeps the requests of a sample, or of its group, on one engine, where routers use it."""
    if args.router_policy not in ("consistent_hashing", "manual"):
        return None
    if args.sglang_routing_key == "group" and sample.group_index is not None:
        return {"X-SMG-Routing-Key": f"group-{sample.group_index}"}
    return {"X-SMG-Routing-Key": sample.session_id} if sample.session_id else None


def append_output(args: Args, sample: Sample, output: dict[str, Any], tokenizer: Any = None) -> None:
    """Append the tokens of an engine's reply to ``sample``. Raises RuntimeError for one that lacks a field.

    Where the engine reports top-p masks, log-probs are those among the kept tokens. Where the text so far ends within a
    character, the ``tokenizer`` makes the text of all tokens: that of two replies would not have the character.
    """
    reported, meta_info = output_tokens(output, with_text=True), output["meta_info"]
    check_prompt(sample, meta_info)
    broken = bool(reported) and sample.response.endswith(_BROKEN_CHARACTER)
    among_kept = meta_info.get("output_token_sampling_logprobs")
    sample.append_response_tokens(
        args,
        tokens=[item[1] for item in reported],
        log_probs=[item[0] for item in reported] if among_kept is None else among_kept,
        meta_info=meta_info,
        text=output["text"],
    )
    if broken and tokenizer is not None:
        made = sample.tokens[-sample.response_length :]
        sample.response = tokenizer.decode(made, skip_special_tokens=args.rollout_skip_special_tokens)


def tokens_left(args: Args, sample: Sample, sampling_params: dict[str, Any], evaluation: bool) -> int:
    limit = sampling_params.get("max_new_tokens")
    contexts = (
        args.eval_max_context_len if evaluation else args.rollout_max_context_len,
        engine_context_len(args),
    )
    room = min((int(context) - len(sample.tokens) for context in contexts if context is not None), default=None)
    left = None if limit is None else int(limit) - sample.response_length
    if left is not None and (room is None or left < 0):
        return left
    if room is None or (left is None and contexts[0] is None):
        raise ValueError("the response has no length limit: set --rollout-max-response-len")
    return max(0, room if left is None else min(left, room))


def prompt_token_ids(state: RequestState, sample: Sample) -> list[int]:
    """Return the token ids of a prompt; of one with images those of the processor, whose other outputs are kept."""
    if not isinstance(sample.prompt, str):
        raise ValueError(
            f"sample index={sample.index} has chat messages as its prompt; use --apply-chat-template to render them, "
            "or a --custom-generate-function-path that takes messages"
        )
    if state.processor is not None and sample.multimodal_inputs:
        ids, inputs = expanded(state, sample.prompt, sample.multimodal_inputs)
        set_train_inputs(sample, inputs)
        return ids
    return bookkeeping_of(state).prompt_tokens.of(state.tokenizer, sample.prompt)


# The longest sequence that an engine takes: it refuses a request for more


def engine_context_len(args: Args) -> int | None:
    """Return the tokens of prompt and response that the run's engines take together; None when it is not known.

    Engines that were started by others may take another number than the checkpoint says; of ``--sglang-config`` it is
    the smallest of the first model's groups.
    """
    if args.debug_train_only:
        return None
    given = args.sglang_context_length
    if args.sglang_config is not None:
        return _shortest_of_groups(args.sglang_config, given, str(args.hf_checkpoint))
    if given is not None:
        return int(given)
    return None if args.rollout_external else _positions(str(args.hf_checkpoint))


@cache
def _shortest_of_groups(sglang_config: str, given: int | None, hf_checkpoint: str) -> int | None:
    model = read_sglang_config(sglang_config)[0].models[0]
    found = []
    for group in model.server_groups:
        if group.worker_type != "placeholder":
            own = group.overrides.get("context_length", given)
            path = group.overrides.get("model_path") or model.model_path or hf_checkpoint
            found.append(_positions(str(path)) if own is None else int(own))
    return min((length for length in found if length is not None), default=None)


def longest_prompt(args: Args) -> int | None:
    """Return the tokens of the longest prompt that leaves room for one to generate; None when it is not known."""
    context = engine_context_len(args)
    return None if context is None else context - 1


@cache
def _positions(hf_checkpoint: str) -> int | None:
    try:
        config = read_config(hf_checkpoint)
    except ArgumentError:
        return None  # reported where the checkpoint is loaded
    longest = config.get("max_position_embeddings")
    stretched = hf_fields.rope_scaling(config) is not None
    return longest if isinstance(longest, int) and not stretched else None

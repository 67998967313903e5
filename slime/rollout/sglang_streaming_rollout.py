"""Generation that reads the engine's answer as it grows (``--custom-generate-function-path``).

A sample has the tokens that have arrived at any moment: those who show or supervise samples see them, a rollout that
ends need not wait for the engine, and a connection that breaks off costs no token.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import random
import time
from collections.abc import Mapping
from typing import Any

from slime.arguments.args import Args
from slime.observability.trace_utils import build_sglang_meta_trace_attrs, trace_span
from slime.rollout import sglang_rollout
from slime.rollout.requests.engines import describe_engines
from slime.rollout.requests.generate_request import Resumes, append_output, generate_payload, routing_headers
from slime.rollout.requests.images import prepare
from slime.servers.engine_replies import meta_of
from slime.servers.http_client import RETRIED_STATUSES
from slime.servers.http_replies import wrong_with
from slime.servers.http_utils import HttpRequestError, HttpTimeoutError, StreamLostError, get_http_client
from slime.utils.declared import with_defaults
from slime.utils.types import Sample

__all__ = ["generate_streaming"]

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, MOST_PAUSE_S = 0.25, 10.0
_ABORT = {"type": "abort"}
_GROWS = (
    "tokens",
    "response",
    "response_length",
    "loss_mask",
    "rollout_log_probs",
    "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets",
    "rollout_routed_experts",
    "weight_versions",
    "weight_version_spans",
    "spec_info",
    "prefix_cache_info",
    "status",
)
"""The fields of a sample that an engine's reply changes."""


async def generate_streaming(
    args: Args, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample:
    """Do what ``slime.rollout.sglang_rollout.generate`` does, with ``"stream": true``; return the same sample.

    When the rollout is aborted, the sample is ABORTED with the tokens that had arrived. Every event must come within
    ``--rollout-request-timeout``. A stream that breaks off is continued by another request.
    """
    args = with_defaults(args)
    state = sglang_rollout.GenerateState(args)
    await prepare(state, sample)
    resumes = Resumes(state, sample)
    while (payload := generate_payload(args, sample, sampling_params, evaluation, state)) is not None:
        await _stream(args, sample, payload)
        if not await resumes.needed():
            break
    return sample


generate_streaming.resumable = True  # type: ignore[attr-defined]


async def _stream(args: Args, sample: Sample, payload: dict[str, Any]) -> None:
    answer = _GrowingAnswer(args, sample, getattr(sglang_rollout.GenerateState(args), "tokenizer", None))
    limit = {"max_new_tokens": payload["sampling_params"]["max_new_tokens"]}
    with trace_span(sample, "sglang_generate_stream", limit) as span:
        try:
            await _read(args, sample, payload, answer)
        except StreamLostError as e:
            logger.warning(
                "the stream of sample index=%s was lost, it is resumed from its last token: %s", sample.index, e
            )
        except HttpTimeoutError as e:
            e.add_note(await describe_engines(sglang_rollout.get_model_url(args, "default", "")))
            raise
        finally:
            answer.close()
        span.update(**build_sglang_meta_trace_attrs(answer.meta_info))


async def _read(args: Args, sample: Sample, payload: dict[str, Any], answer: _GrowingAnswer) -> None:
    """Read the answer; ask again, after a pause that grows, while the engine has no room for the request.

    Of an answer that cannot be trained on nothing is kept: it counts as lost.
    """
    state = sglang_rollout.GenerateState(args)
    url = sglang_rollout.get_model_url(args, "default")
    headers = routing_headers(args, sample)
    client = get_http_client()
    router_url, answers = url.rpartition("/")[0], client.answers
    limit, began = client.request_timeout, time.monotonic()
    for attempt in itertools.count():
        oldest = answers.oldest_version.get(router_url)
        async with client.stream(url, payload, headers=headers) as events:
            async for event in events:
                if (wrong := wrong_with(event, oldest)) is not None:
                    answer.discard()
                    reason = answers.reject(router_url, events.engine_url, wrong)
                    elapsed = time.monotonic() - began
                    raise StreamLostError("POST", url, reason, status=200, body="", attempts=1, elapsed=elapsed)
                answer.take(event, url)
                if state.aborted and not answer.finished:
                    return
        if not answer.turned_away or state.aborted:
            return
        elapsed = time.monotonic() - began
        if elapsed > limit:
            reason = f"was turned away for {limit:g} s (--rollout-request-timeout)"
            raise HttpTimeoutError("POST", url, reason, status=503, body="", attempts=attempt + 1, elapsed=elapsed)
        await asyncio.sleep(min(MOST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(attempt, 10)) * random.uniform(0.5, 1.0))


class _GrowingAnswer:
    """One streamed reply: every event repeats all of it, so the sample is rebuilt from its state before the request."""

    def __init__(self, args: Args, sample: Sample, tokenizer: Any = None) -> None:
        self.args, self.tokenizer = args, tokenizer
        self.sample = sample
        self.finished = self.turned_away = False
        self._before = {name: copy.copy(getattr(sample, name)) for name in _GROWS}
        self._latest: dict[str, Any] | None = None

    @property
    def meta_info(self) -> Mapping[str, Any]:
        return {} if self._latest is None else self._latest["meta_info"]

    def take(self, event: dict[str, Any], url: str) -> None:
        """Let the sample be what it was, and ``event``."""
        reason: Any = meta_of(event).get("finish_reason")
        status = reason.get("status_code") if isinstance(reason, Mapping) and reason.get("type") == "abort" else None
        if status is not None and status not in RETRIED_STATUSES:
            raise HttpRequestError(
                "POST", url, "was refused", status=status, body=str(reason.get("message")), attempts=1, elapsed=0.0
            )
        self.turned_away = status is not None
        self._check_whole(event)
        self._latest, self.finished = event, reason is not None
        self._rebuild(event)

    def discard(self) -> None:
        """Keep nothing of the answer."""
        self._latest, self.finished = None, False

    def close(self) -> None:
        """Account for an answer that was left before its end as for one that the engine aborted."""
        if self.finished:
            return
        latest = self._latest or {"text": "", "meta_info": {}}
        self._rebuild({**latest, "meta_info": {**latest["meta_info"], "finish_reason": _ABORT}})

    def _rebuild(self, output: dict[str, Any]) -> None:
        for name, value in self._before.items():
            setattr(self.sample, name, copy.copy(value))
        append_output(self.args, self.sample, output, self.tokenizer)

    def _check_whole(self, event: dict[str, Any]) -> None:
        """Refuse what engines send under --incremental-streaming-output: the new tokens only."""
        made, reported = event["meta_info"].get("completion_tokens"), event["meta_info"].get("output_token_logprobs")
        if isinstance(made, int) and reported is not None and len(reported) < made:
            raise ValueError(
                f"sample index={self.sample.index}: an event of the stream has {len(reported)} of {made} tokens, but "
                "generate_streaming needs events that repeat the earlier ones; leave out "
                "--sglang-incremental-streaming-output"
            )

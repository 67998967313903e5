"""A gateway as a command of its own: ``python -m slime.agent.serve --engine URL --sink BUFFER_URL``.

Agents in any process or language use it through the APIs of Anthropic and OpenAI, and open and finish their sessions
over HTTP. Finished sessions are written to the rollout buffer at ``--sink``, from where a run fetches them.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import re
import uuid
from typing import Any

from aiohttp import web

from slime.agent.adapters.anthropic import AnthropicFormat
from slime.agent.adapters.anthropic import list_models as list_models_of_anthropic
from slime.agent.adapters.common import Handler
from slime.agent.adapters.generation import INT32, check_defaults
from slime.agent.adapters.http_requests import Refusal, json_object, refusal_of
from slime.agent.adapters.openai import OpenAIAdapter
from slime.agent.adapters.openai_common import list_models, openai_error
from slime.agent.adapters.side_requests import is_agent_turn
from slime.servers import http_utils
from slime.servers.auth import bearer_token, is_key, is_loopback
from slime.servers.bounded_site import run_app
from slime.servers.http_client import HttpClient, HttpRequestError
from slime.servers.key_file import KEY_VARIABLE, key_for, shared_key
from slime.utils.image_tokens import as_png
from slime.utils.plain_numbers import is_integer, reward_problem
from slime.utils.processing_utils import load_processor, load_tokenizer
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

ENGINE_KEY_VARIABLE = "SLIME_AGENT_ENGINE_KEY"
SINK_TIMEOUT_S = 600.0
MOST_SESSIONS = 16_384
"""Open, or finished and not written yet."""
_SESSION_ID = re.compile(r"[!-~]{1,256}")
RECORDED = (
    "tokens", "response", "response_length", "loss_mask", "rollout_log_probs", "weight_versions",
    "weight_version_spans", "metadata",
)  # fmt: skip
"""The attributes of a sample that a trajectory of the buffer has."""


class Gateway(OpenAIAdapter):
    """All protocols on one port, and routes that open and finish sessions; those need the ``key``, which no agent has.

    Every finished session becomes one trajectory of the rollout buffer at ``sink``. Only open sessions are served. The
    key is also that of the buffer; without one it is ``shared_key()``.
    """

    stop_keys = ("stop", "stop_sequences")
    makes_pixels = False
    """The run makes them, of the images that it gets."""

    def __init__(self, *, sink: str, key: str | None = None, max_context_tokens: int = 0, **options: Any) -> None:
        super().__init__(debug_callback=self._note_conversation, **options)
        self.sink, self.key, self.max_context_tokens = sink.rstrip("/"), key or shared_key(), max_context_tokens
        self.instances: dict[str, str] = {}
        self.conversations: dict[str, list[dict[str, Any]]] = {}
        self.unsent: dict[str, dict[str, Any]] = {}
        self.client = HttpClient(16, SINK_TIMEOUT_S, key or key_for(self.sink))
        self.client.trust(self.sink)
        self.app.on_cleanup.append(self._close)

    def add_routes(self, router: web.UrlDispatcher) -> None:
        super().add_routes(router)
        anthropic = AnthropicFormat()
        router.add_post("/v1/messages", self.answering(anthropic))
        router.add_post("/v1/messages/count_tokens", self.answering(anthropic, count_tokens=True))
        router.add_post("/sessions", self._control(self.open))
        router.add_post("/sessions/{sid}/finish", self._control(self.finish))
        router.add_delete("/sessions/{sid}", self._control(self.drop))

    async def list_models(self, request: web.Request) -> web.Response:
        """As the client's protocol has it."""
        return await (list_models_of_anthropic if "anthropic-version" in request.headers else list_models)(request)

    async def open(self, request: web.Request) -> web.Response:
        """``{"instance_id", "session_id"?, "sampling_params"?, "max_context_tokens"?}``: open a session."""
        body = await json_object(request)
        instance, defaults = body.get("instance_id"), body.get("sampling_params") or {}
        limit, sid = body.get("max_context_tokens", self.max_context_tokens), body.get("session_id")
        if not ((isinstance(instance, str) and instance) or is_integer(instance)):
            raise ValueError("instance_id must say which task this is an attempt at: a text or a whole number")
        if sid is not None and not (isinstance(sid, str) and _SESSION_ID.fullmatch(sid)):
            raise ValueError(f"session_id must be 1 to 256 visible characters of ASCII, not {sid!r:.100}")
        if not isinstance(defaults, dict):
            raise ValueError("sampling_params must be an object")
        check_defaults(defaults)
        if not is_integer(limit) or not 0 <= limit <= INT32:
            raise ValueError(
                f"max_context_tokens must be a whole number from 0 (no limit) to {INT32}, not {limit!r:.100}"
            )
        sid = sid or uuid.uuid4().hex
        if sid in self.unsent:
            raise ValueError(f"session {sid!r} was finished and is not written yet: finish it again, or drop it")
        if len(self.store) + len(self.unsent) >= MOST_SESSIONS:
            raise Refusal(429, "rate_limit_error", f"{MOST_SESSIONS} sessions are open, as many as may be")
        self.open_session(sid, sampling_defaults=defaults, max_context_tokens=limit)
        self.instances[sid] = str(instance)
        return web.json_response({"session_id": sid, "instance_id": str(instance)})

    async def finish(self, request: web.Request) -> web.Response:
        """``{"reward", "extra_info"?}``: close a session and write it to the sink; again if that failed before."""
        sid = request.match_info["sid"]
        body = await json_object(request)
        if "reward" not in body or not isinstance(body.get("extra_info") or {}, dict):
            raise ValueError("a session is finished with a reward, and extra_info, if it is given, is an object")
        if problem := reward_problem(body["reward"]):
            raise ValueError(problem)
        item = self.unsent.get(sid)
        if item is None:
            item = await self._item(sid, body["reward"], body.get("extra_info") or {})
        self.unsent[sid] = item
        await self._send(sid, item)
        trained = sum(sum(sample["loss_mask"]) for sample in item["samples"])
        return web.json_response({"session_id": sid, "samples": len(item["samples"]), "trained_tokens": trained})

    async def _send(self, sid: str, item: dict[str, Any]) -> None:
        """Write ``item``. It stays in ``unsent`` as long as sending it again may help."""
        try:
            await self.write(item)
        except HttpRequestError as e:
            if e.status is None or not 400 <= e.status < 500 or e.status in (401, 403, 408, 429):
                raise
            self.unsent.pop(sid, None)
            logger.error("session %r is lost: %s", sid, e)
            raise ValueError(f"the rollout buffer refused the session, which is dropped: {e.body!s:.500}") from None
        except (TypeError, UnicodeError, OverflowError) as e:
            self.unsent.pop(sid, None)
            logger.error("session %r is lost: it cannot be written as JSON: %r", sid, e)
            raise ValueError(f"the session cannot be written as JSON and is dropped: {e}") from None
        self.unsent.pop(sid, None)

    async def write(self, item: dict[str, Any]) -> None:
        """Send the trajectory of a session to the sink. Raises HttpRequestError when it does not take it."""
        await self.client.post(f"{self.sink}/buffer/write", item, max_retries=20)

    async def drop(self, request: web.Request) -> web.Response:
        """Forget a session: nothing is written. One that could not be written is forgotten too."""
        sid = request.match_info["sid"]
        if self.unsent.pop(sid, None) is None:
            self._take(sid)
        await self.drop_session(sid)
        self.conversations.pop(sid, None)
        return web.json_response({"session_id": sid})

    def _take(self, sid: str) -> str:
        try:
            return self.instances.pop(sid)
        except KeyError:
            raise ValueError(f"session {sid!r} is not open") from None

    async def _item(self, sid: str, reward: float | dict[str, Any], extra_info: dict[str, Any]) -> dict[str, Any]:
        """The trajectory of a session, as the rollout buffer takes it."""
        instance = self._take(sid)
        samples = await self.finish_session(sid, base_sample=Sample(), reward=reward)
        if not samples:
            extra_info = {"error": "the session has no turn to train on", **extra_info}
        records = [{name: getattr(sample, name) for name in RECORDED} for sample in samples]
        for record, sample in zip(records, samples, strict=True):
            record["loss_mask"] = sample.loss_mask or [1] * sample.response_length
            record["agent_session"] = sample.agent_session  # type: ignore[attr-defined]
            if images := (sample.multimodal_inputs or {}).get("images"):
                record["images"] = [as_png(image) for image in images]
        return {
            "uid": sid,
            "instance_id": instance,
            "messages": self.conversations.pop(sid, None) or [{"role": "user", "content": ""}],
            "reward": reward,
            "extra_info": extra_info,
            "samples": records,
        }

    async def _close(self, app: web.Application) -> None:
        await self.client.close()

    def _note_conversation(
        self, sid: str, messages: list[Any], tools: object, said: dict[str, Any], turn: object
    ) -> None:
        self.conversations[sid] = [*messages, said]

    def _control(self, handler: Handler) -> Handler:
        """``handler`` for requests with the key; what it raises becomes an answer."""

        async def handle(request: web.Request) -> web.StreamResponse:
            if not is_key(bearer_token(request.headers.get("Authorization")), self.key):
                message = f"give the key of {KEY_VARIABLE}, or of ~/.slime/key, as bearer token"
                return web.json_response(openai_error("authentication_error", message), status=401)
            try:
                return await handler(request)
            except ValueError as e:
                return web.json_response(openai_error("invalid_request_error", str(e)), status=400)
            except HttpRequestError as e:
                logger.error("a session could not be written: %s", e)
                message = "the rollout buffer did not take the session; finish it again"
                return web.json_response(openai_error("api_error", message), status=502)
            except Exception as e:  # noqa: BLE001  (it is logged, and reported to the client)
                refusal = refusal_of(e)
                return web.json_response(openai_error(refusal.kind, refusal.message), status=refusal.status)

        return handle


async def checkpoint_of(engine: str) -> str:
    """The path of the tokenizer that the engine reports."""
    for path in ("model_info", "get_model_info", "get_server_info"):
        try:
            info = await http_utils.get(f"{engine}/{path}")
        except HttpRequestError:
            continue
        if isinstance(info, dict) and (found := info.get("tokenizer_path") or info.get("model_path")):
            return str(found)
    raise ValueError(f"{engine} does not say what model it has: give --hf-checkpoint")


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m slime.agent.serve", description=__doc__)
    add = parser.add_argument
    add("--engine", required=True, metavar="URL", help="of the router or an engine")
    add("--sink", required=True, metavar="URL", help="of the rollout buffer that finished sessions are written to")
    add("--hf-checkpoint", help="directory with the tokenizer; default: what the engine says")
    add("--trust-remote-code", action="store_true", help="let the tokenizer be code of the checkpoint")
    add(
        "--image-processor-backend", choices=["pil", "torchvision", "auto"], default="pil",
        help="what prepares images, for checkpoints that see; that of the engines",
    )  # fmt: skip
    add("--host", default="127.0.0.1", help=f"address to listen on; not loopback needs {KEY_VARIABLE}")
    add("--port", type=int, default=8890)
    add("--tool-call-parser", help="SGLang's name of the model's format of tool calls")
    add("--reasoning-parser", help="SGLang's name of the model's format of reasoning")
    add("--max-turns", type=int, help="of one session")
    add("--max-context-tokens", type=int, default=0, help="of prompt and answer together, unless a session says it")
    add("--fork-threshold-tokens", type=int, help="generated tokens that may be given up without a sample of their own")
    add("--train-side-requests", action="store_true", help="train also on titles, topics and probes of the agents")
    return parser


def main() -> None:
    parser = make_parser()
    words = parser.parse_args()
    key = os.environ.get(KEY_VARIABLE) or None
    if key is None and not is_loopback(words.host):
        parser.error(f"--host {words.host} can be reached from elsewhere: set {KEY_VARIABLE}, here and for the buffer")
    logging.basicConfig(level=logging.INFO)
    engine = words.engine.rstrip("/")
    http_utils._http_client = HttpClient(http_utils.DEFAULT_CONCURRENCY, api_key=os.environ.get(ENGINE_KEY_VARIABLE))
    http_utils._http_client.trust(engine)
    try:
        checkpoint = words.hf_checkpoint or asyncio.run(checkpoint_of(engine))
        trust = {"trust_remote_code": words.trust_remote_code}
        tokenizer = load_tokenizer(checkpoint, **trust)
        processor = load_processor(checkpoint, backend=words.image_processor_backend, **trust)
    except ValueError as e:
        parser.error(str(e))
    gateway = Gateway(
        sink=words.sink,
        key=key,
        max_context_tokens=words.max_context_tokens,
        tokenizer=tokenizer,
        processor=processor,
        sglang_url=engine,
        tool_parser=words.tool_call_parser,
        reasoning_parser=words.reasoning_parser,
        max_turns_per_sid=words.max_turns,
        fork_threshold_tokens=words.fork_threshold_tokens,
        turn_filter=None if words.train_side_requests else is_agent_turn,
    )
    options: dict[str, Any] = {"handler_cancellation": True, "shutdown_timeout": 5.0, "access_log": None}
    run_app(gateway.app, words.host, words.port, **options)


if __name__ == "__main__":
    main()

"""A gateway as a command of its own: ``python -m slime.agent.serve --engine URL --sink BUFFER_URL``.

Agents in any process or language use it through the APIs of Anthropic and OpenAI, and open and finish their sessions
over HTTP. Finished sessions are written to the rollout buffer at ``--sink``, from where a run fetches them.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import logging
import os
import uuid
from typing import Any

from aiohttp import web

from slime.agent.adapters.anthropic import AnthropicFormat
from slime.agent.adapters.anthropic import list_models as list_models_of_anthropic
from slime.agent.adapters.common import Handler
from slime.agent.adapters.http_requests import Refusal, json_object, refusal_of
from slime.agent.adapters.openai import OpenAIAdapter
from slime.agent.adapters.openai_common import list_models, openai_error
from slime.agent.adapters.side_requests import is_agent_turn
from slime.servers.auth import is_loopback
from slime.utils import http_utils
from slime.utils.http_client import HttpClient, HttpRequestError
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

KEY_VARIABLE = "SLIME_ROLLOUT_BUFFER_KEY"
ENGINE_KEY_VARIABLE = "SLIME_AGENT_ENGINE_KEY"
SINK_TIMEOUT_S = 600.0
RECORDED = (
    "tokens", "response", "response_length", "loss_mask", "rollout_log_probs", "weight_versions",
    "weight_version_spans", "metadata",
)  # fmt: skip
"""The attributes of a sample that a trajectory of the buffer has."""


class Gateway(OpenAIAdapter):
    """All protocols on one port, and routes that open and finish sessions; those need the ``key``, where there is one.

    Every finished session becomes one trajectory of the rollout buffer at ``sink``. Only open sessions are served.
    """

    stop_keys = ("stop", "stop_sequences")

    def __init__(self, *, sink: str, key: str | None = None, max_context_tokens: int = 0, **options: Any) -> None:
        super().__init__(debug_callback=self._note_conversation, **options)
        self.sink, self.key, self.max_context_tokens = sink.rstrip("/"), key, max_context_tokens
        self.instances: dict[str, str] = {}
        self.conversations: dict[str, list[dict[str, Any]]] = {}
        self.unsent: dict[str, dict[str, Any]] = {}
        self.client = HttpClient(16, SINK_TIMEOUT_S, key)
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
        limit = body.get("max_context_tokens", self.max_context_tokens)
        sid = body.get("session_id") or uuid.uuid4().hex
        if not isinstance(instance, (str, int)) or not isinstance(sid, str):
            raise ValueError("instance_id must say which task this is an attempt at; session_id is a string")
        if not isinstance(defaults, dict) or not isinstance(limit, int):
            raise ValueError("sampling_params must be an object and max_context_tokens a number")
        self.open_session(sid, sampling_defaults=defaults, max_context_tokens=limit)
        self.instances[sid] = str(instance)
        return web.json_response({"session_id": sid, "instance_id": str(instance)})

    async def finish(self, request: web.Request) -> web.Response:
        """``{"reward", "extra_info"?}``: close a session and write it to the sink; again if that failed before."""
        sid = request.match_info["sid"]
        body = await json_object(request)
        if "reward" not in body or not isinstance(body.get("extra_info", {}), dict):
            raise ValueError("a session is finished with a reward, and extra_info, if it is given, is an object")
        item = self.unsent.get(sid)
        if item is None:
            item = await self._item(sid, body["reward"], body.get("extra_info") or {})
        self.unsent[sid] = item
        await self.write(item)
        self.unsent.pop(sid, None)
        trained = sum(sum(sample["loss_mask"]) for sample in item["samples"])
        return web.json_response({"session_id": sid, "samples": len(item["samples"]), "trained_tokens": trained})

    async def write(self, item: dict[str, Any]) -> None:
        """Send the trajectory of a session to the sink. Raises HttpRequestError when it does not take it."""
        await self.client.post(f"{self.sink}/buffer/write", item, max_retries=20)

    async def drop(self, request: web.Request) -> web.Response:
        """Forget a session: nothing is written."""
        sid = request.match_info["sid"]
        self._take(sid)
        await self.drop_session(sid)
        self.conversations.pop(sid, None)
        return web.json_response({"session_id": sid})

    def _check_access(self, sid: str, request: web.Request) -> None:
        super()._check_access(sid, request)
        if sid not in self.store:  # nobody would finish it
            raise Refusal(401, "authentication_error", "the token must be the id of an open session")

    def _take(self, sid: str) -> str:
        try:
            return self.instances.pop(sid)
        except KeyError:
            raise ValueError(f"session {sid!r} is not open") from None

    async def _item(self, sid: str, reward: Any, extra_info: dict[str, Any]) -> dict[str, Any]:
        """The trajectory of a session, as the rollout buffer takes it."""
        instance = self._take(sid)
        samples = await self.finish_session(sid, base_sample=Sample(), reward=reward)
        if not samples:
            extra_info = {"error": "the session has no turn to train on", **extra_info}
        records = [{name: getattr(sample, name) for name in RECORDED} for sample in samples]
        for record, sample in zip(records, samples, strict=True):
            record["loss_mask"] = sample.loss_mask or [1] * sample.response_length
            record["agent_session"] = sample.agent_session  # type: ignore[attr-defined]
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

    def _note_conversation(self, sid: str, messages: list[Any], tools: Any, said: Any, turn: Any) -> None:
        self.conversations[sid] = [*messages, said]

    def _control(self, handler: Handler) -> Handler:
        """``handler`` for requests of this host, or with the key; what it raises becomes an answer."""

        async def handle(request: web.Request) -> web.StreamResponse:
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            has_key = self.key is not None and hmac.compare_digest(given.encode(), self.key.encode())
            if not has_key and (self.key is not None or not is_loopback(request.remote or "127.0.0.1")):
                return web.json_response(openai_error("authentication_error", f"give {KEY_VARIABLE}"), status=401)
            try:
                return await handler(request)
            except ValueError as e:
                return web.json_response(openai_error("invalid_request_error", str(e)), status=400)
            except HttpRequestError as e:
                logger.error("a session could not be written: %s", e)
                message = "the rollout buffer did not take the session; finish it again"
                return web.json_response(openai_error("api_error", message), status=502)
            except Exception as e:  # noqa: BLE001  (it is logged, and the client told)
                refusal = refusal_of(e)
                return web.json_response(openai_error(refusal.kind, refusal.message), status=refusal.status)

        return handle


async def checkpoint_of(engine: str) -> str:
    """The path of the tokenizer that the engine says it uses."""
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
        tokenizer = load_tokenizer(checkpoint, trust_remote_code=words.trust_remote_code)
    except ValueError as e:
        parser.error(str(e))
    gateway = Gateway(
        sink=words.sink,
        key=key,
        max_context_tokens=words.max_context_tokens,
        tokenizer=tokenizer,
        sglang_url=engine,
        tool_parser=words.tool_call_parser,
        reasoning_parser=words.reasoning_parser,
        max_turns_per_sid=words.max_turns,
        fork_threshold_tokens=words.fork_threshold_tokens,
        turn_filter=None if words.train_side_requests else is_agent_turn,
    )
    options: dict[str, Any] = {"handler_cancellation": True, "shutdown_timeout": 5.0, "access_log": None}
    web.run_app(gateway.app, host=words.host, port=words.port, print=logger.info, **options)


if __name__ == "__main__":
    main()

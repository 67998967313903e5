"""The common part of all gateways: sessions, messages to tokens and back, errors, and how a turn reaches the
engine and the trajectory.

Users replace ``call_sglang_generate`` by patching it here: it is looked up in this module for every turn.
"""

from __future__ import annotations

import abc
import asyncio
import itertools
import logging
import threading
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from aiohttp import web

from slime.agent import sglang_parsers
from slime.agent.adapters.event_stream import EventStream, wants_stream
from slime.agent.adapters.generation import Generated, Replies, generated, left_of, sampling_params
from slime.agent.adapters.http_requests import (
    ClientGone,
    Refusal,
    bad_request,
    generate_for,
    is_gone,
    json_object,
    refusal_of,
    refuse,
    session_closed,
    told,
)
from slime.agent.adapters.in_flight import InFlight
from slime.agent.adapters.provider import Message, ParsedRequest, ProviderFormat
from slime.agent.adapters.side_requests import turn_meta
from slime.agent.aiohttp_threaded import REQUIRES_TOKEN
from slime.agent.images import SessionImages
from slime.agent.parsing import ParsedModelOutput, parse_model_output
from slime.agent.trajectory import (
    RENDERING,
    MessageNode,
    Placeholders,
    Rendering,
    TrajectoryManager,
    TurnRecord,
    with_own_tokens,
)
from slime.servers.auth import is_loopback
from slime.servers.http_utils import post
from slime.servers.request_checks import browser_guard
from slime.utils.chat_messages import has_media, item_of, media_kind
from slime.utils.image_tokens import WithImages, forbidden_ids, placeholder, placeholder_id, without_placeholders
from slime.utils.images import ImageError
from slime.utils.sampling import asked_fields
from slime.utils.types import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slime.arguments.args import Args

__all__ = [
    "BaseAdapter",
    "Reply",
    "Session",
    "TurnRecord",
    "call_sglang_generate",
    "flatten_content",
    "manager_finish_reason",
    "sid_from_bearer",
    "sid_from_body",
    "tool_call_dict",
]

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

DEFAULT_SID = "default"
MAX_BODY_BYTES = 64 << 20
CLOSED_SIDS_KEPT = 1 << 16
RESUME_PAUSE_S = 1.0
MAX_RESUMES_WITHOUT_PROGRESS = 20


@dataclass
class Session:
    """The settings of all turns of a session. ``max_context_tokens`` bounds prompt and answer together; 0: no bound."""

    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    max_context_tokens: int = 0
    side_requests: int = field(default=0, compare=False)
    """The number of turns answered that the ``turn_filter`` did not want recorded."""
    images: SessionImages = field(default_factory=SessionImages, compare=False)


@dataclass(frozen=True)
class Reply:
    """An answer, before a provider's format. ``finish_reason``: ``stop``, ``length`` or ``tool_calls``."""

    reasoning: str
    text: str
    tool_uses: list[dict[str, Any]]
    finish_reason: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0


class BaseAdapter(ProviderFormat):
    """An aiohttp application (``app``) that answers a provider's requests from an engine and records every turn.

    It is the format of one provider itself; with ``answering`` it takes requests in others too.

    ``sglang_url`` is the router's or an engine's address. ``tool_parser`` and ``reasoning_parser`` are names of
    SGLang's parsers (``slime.agent.parsing``). A session has at most ``max_turns_per_sid`` turns. ``debug_callback(sid,
    translated_messages, tools_schema, manager_message, turn)`` sees every turn that is recorded. Turns for which
    ``turn_filter`` returns False are answered and not recorded; it is given what ``side_requests.turn_meta`` returns,
    and the translated ``messages``.

    With the ``processor`` of the checkpoint, if that takes images, the model sees those of requests, else they are left
    out. Its backend is to be that of the engines. With the ``args`` of a run with ``--use-rollout-routing-replay``
    samples have the experts that the engines chose.

    The session id of a request is its token, which must be that of an open session. One that is called ``default``,
    for requests without a token, is for this host only.
    """

    max_tokens_keys: ClassVar[tuple[str, ...]]
    stop_keys: ClassVar[tuple[str, ...]]
    makes_pixels: ClassVar[bool] = True
    """True if samples get the trainer's tensors of their images."""

    def __init__(
        self,
        *,
        tokenizer: PreTrainedTokenizerBase,
        sglang_url: str,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        max_turns_per_sid: int | None = None,
        fork_threshold_tokens: int | None = None,
        debug_callback: Callable[[str, list[Message], list[Message] | None, Message, TurnRecord], Any] | None = None,
        turn_filter: Callable[[Mapping[str, Any]], bool] | None = None,
        processor: Any = None,
        args: Args | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.replay = args if args is not None and args.use_rollout_routing_replay else None
        self.processor = processor if isinstance(getattr(processor, "image_token", None), str) else None
        self.sglang_url = sglang_url.rstrip("/").removesuffix("/generate")
        self.text = TextWorker(tokenizer, tool_parser, reasoning_parser)
        self.max_turns_per_sid = max_turns_per_sid
        self.debug_callback = debug_callback
        self.turn_filter = turn_filter
        self.manager = TrajectoryManager(fork_threshold_tokens=fork_threshold_tokens)
        self.store: dict[str, Session] = {}
        self.closed: dict[str, None] = {}
        self.inflight = InFlight()
        self._lock = threading.RLock()  # over store and closed: sessions end on other threads than turns are answered
        self.app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[browser_guard(refuse)])
        self.app[REQUIRES_TOKEN] = True
        for path in ("/", "/healthz"):  # Claude Code asks for the first to see whether anything answers
            self.app.router.add_get(path, _health)
        self.add_routes(self.app.router)

    @abc.abstractmethod
    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Add the provider's paths; ``handle_turn`` answers those that generate."""

    def open_session(
        self, sid: str, *, sampling_defaults: Mapping[str, Any] | None = None, max_context_tokens: int = 0
    ) -> None:
        """Let the turns of ``sid`` in. Raises ValueError when it is open already."""
        with self._lock:
            if sid in self.store:
                raise ValueError(f"session {sid!r} is open already; every session needs an id of its own")
            self.closed.pop(sid, None)
            self.store[sid] = Session(dict(sampling_defaults or {}), max_context_tokens)

    async def finish_session(
        self,
        sid: str,
        *,
        base_sample: Sample,
        reward: float | dict[str, Any] = 0.0,
        extra_metadata: Mapping[str, Any] | None = None,
        wait_timeout: float = 5.0,
    ) -> list[Sample]:
        """Close ``sid``, wait for its turns as ``shutdown_session`` does, and return its samples with their text.

        From any event loop. See ``TrajectoryManager.get_trajectory``.
        """
        await self.shutdown_session(sid, wait_timeout=wait_timeout)
        with self._lock:
            session = self.store.pop(sid, None) or Session()
            samples = self.manager.get_trajectory(
                sid,
                base_sample=base_sample,
                reward=reward,
                extra_metadata=extra_metadata,
                max_sample_tokens=session.max_context_tokens,
                placeholders=self._placeholders(session),
            )
        decode = self.text.decode if self.processor is None else self.text.decode_with(WithImages(self))
        for sample in samples:
            sample.response = await decode(sample.tokens[-sample.response_length :])
        if session.images.seen:
            await asyncio.to_thread(session.images.show, self, samples, pixels=self.makes_pixels)
        return samples

    def _placeholders(self, session: Session) -> Placeholders | None:
        lengths = {digest: seen.length for digest, seen in list(session.images.seen.items())}
        return Placeholders(placeholder_id(self), lengths) if lengths else None

    async def drop_session(self, sid: str, *, wait_timeout: float = 5.0) -> None:
        """Close ``sid``, wait for its turns, and forget what they were."""
        await self.shutdown_session(sid, wait_timeout=wait_timeout)
        with self._lock:
            self.store.pop(sid, None)
            self.manager.drop_session(sid)

    async def shutdown_session(self, sid: str, *, wait_timeout: float = 5.0) -> None:
        """Let no turn of ``sid`` in any more and wait for those in flight.

        Those that take longer than ``wait_timeout`` s are cut off: aborted on the engine and not recorded.
        """
        with self._lock:
            self.closed[sid] = None
            while len(self.closed) > CLOSED_SIDS_KEPT:
                del self.closed[next(iter(self.closed))]
        if not await self.inflight.drain(sid, wait_timeout):
            logger.warning("session %r: a turn that was cut off has not ended; it is not recorded", sid)

    async def handle_turn(self, request: web.Request) -> web.StreamResponse:
        """Answer a request that generates."""
        return await self._or_error(self._answer, request, self)

    async def handle_count_tokens(self, request: web.Request) -> web.StreamResponse:
        """Answer with the length of the prompt that a turn with this body would have."""
        return await self._or_error(self._count_tokens, request, self)

    def answering(self, api: ProviderFormat, *, count_tokens: bool = False) -> Handler:
        """The handler of requests in the format of ``api`` that generate, or count tokens."""
        answer = self._count_tokens if count_tokens else self._answer

        async def handle(request: web.Request) -> web.StreamResponse:
            return await self._or_error(answer, request, api)

        return handle

    async def _or_error(
        self,
        answer: Callable[[web.Request, ProviderFormat], Awaitable[web.StreamResponse]],
        request: web.Request,
        api: ProviderFormat,
    ) -> web.StreamResponse:
        try:
            return await answer(request, api)
        except ClientGone:
            return web.Response(status=499, reason="Client Closed Request")
        except web.HTTPException:
            raise
        except Exception as e:  # noqa: BLE001  (it is logged, and reported to the client)
            refusal = refusal_of(e)
            return web.json_response(api.error_body(refusal.kind, refusal.message), status=refusal.status)

    async def _answer(self, request: web.Request, api: ProviderFormat) -> web.StreamResponse:
        body = await json_object(request)
        sid = api.session_id(request, body)
        with self.inflight.turn(sid) as in_flight:  # before the session is looked at: who closes it sees the turn
            session = self._open_session_of(sid, request)
            # those in flight count too: sub-agents must not pass the cap together
            cap = self.max_turns_per_sid
            had = self.manager.turn_count(sid) + session.side_requests
            if cap is not None and had + self.inflight.count(sid) > cap:
                raise Refusal(429, "rate_limit_error", f"the session has had its {cap} turns")
            messages, tools, prompt_ids, rendering, images = await self._prompt(sid, session, api, body)
            more = session.images.extra(images)  # tokens than the prompt's ids
            asked = ParsedRequest(body, len(prompt_ids) + more)
            stream = EventStream(request, api, asked) if wants_stream(request, body) else None
            try:
                generation = self._generate(prompt_ids, session, body, sid, tools, images)
                turn, parsed = await generate_for(
                    generation, in_flight, request, None if stream is None else stream.keep_alive
                )
                cached = turn.meta_info.get("cached_tokens") or 0
                sizes = len(turn.prompt_ids) + more, len(turn.output_ids), cached
                reply = Reply(parsed.reasoning, parsed.text, parsed.tool_uses, turn.finish_reason, *sizes)
                message = api.reply_message(reply, body)
                if is_gone(request):
                    raise ClientGone
                meta = turn_meta(request.path, body, tools, self.max_tokens_keys)
                if self.turn_filter is None or self.turn_filter({**meta, "messages": messages}):
                    said = api.translate_reply(message)
                    self._record(sid, session, (messages, tools), said, turn, {**meta, RENDERING: rendering})
                else:
                    session.side_requests += 1
            except Exception as e:
                if stream is None or not stream.is_open:
                    raise
                if isinstance(e, ClientGone):
                    return stream.response
                refusal = refusal_of(e)
                return await stream.end([api.error_event(refusal.kind, refusal.message, asked)])
            answer = api.reply_body(message, reply, asked)
            return web.json_response(answer) if stream is None else await stream.end(api.reply_events(answer, asked))

    async def _generate(
        self,
        prompt_ids: list[int],
        session: Session,
        body: Mapping[str, Any],
        sid: str,
        tools: list[Message] | None,
        images: list[str],
    ) -> tuple[TurnRecord, ParsedModelOutput]:
        shown: dict[str, Any] = {"images": images} if images else {}
        turn = await call_sglang_generate(prompt_ids, session, body, adapter=self, session_id=sid, **shown)
        parsed = await self.text.parse(turn, tools)
        finish = manager_finish_reason(turn.finish_reason, parsed.tool_uses)
        ill_formed = turn.ill_formed or parsed.ill_formed
        return replace(turn, finish_reason=finish, ill_formed=ill_formed, images=tuple(images)), parsed

    async def _count_tokens(self, request: web.Request, api: ProviderFormat) -> web.StreamResponse:
        body = await json_object(request)
        sid = api.session_id(request, body)
        session = self._open_session_of(sid, request)
        _, _, prompt_ids, _, images = await self._prompt(sid, session, api, body)
        return web.json_response({"input_tokens": len(prompt_ids) + session.images.extra(images)})

    async def _prompt(
        self, sid: str, session: Session, api: ProviderFormat, body: Mapping[str, Any]
    ) -> tuple[list[Message], list[Message] | None, list[int], Rendering | None, list[str]]:
        """The messages and tools of a request, its prompt with the answers as the model wrote them, the template's
        version of that, and the digests of the images, each with one placeholder in the prompt."""
        sent, tools = api.translate(body)
        sent, images = await self._images_of(session, sent)
        messages, known = self.manager.follow(sid, sent)
        ids, rendering = await self.text.render(messages, tools, known)
        if self.processor is not None and (places := ids.count(placeholder_id(self))) != len(images):
            raise bad_request(
                f"the chat template writes {places} places for {len(images)} images; texts may not have the token "
                f"{placeholder(self)}"
            )
        return messages, tools, ids, rendering, images

    async def _images_of(self, session: Session, sent: list[Message]) -> tuple[list[Message], list[str]]:
        if not any(map(has_media, sent)):
            return sent, []
        if self.processor is None:
            return [
                {**message, "content": flatten_content(message["content"])} if has_media(message) else message
                for message in sent
            ], []
        try:
            return await asyncio.to_thread(session.images.messages, self, sent)
        except ImageError as e:
            raise bad_request(str(e)) from e

    def _check_access(self, sid: str, request: web.Request) -> None:
        if sid in self.closed:
            raise session_closed()
        guessed = sid == DEFAULT_SID and not is_loopback(request.remote or "127.0.0.1")
        if guessed or sid not in self.store:
            raise Refusal(401, "authentication_error", "the token must be the id of an open session")

    def _open_session_of(self, sid: str, request: web.Request) -> Session:
        with self._lock:
            self._check_access(sid, request)
            return self.store[sid]

    def _record(
        self,
        sid: str,
        session: Session,
        asked: tuple[list[Message], list[Message] | None],
        said: Message,
        turn: TurnRecord,
        meta: Mapping[str, Any],
    ) -> None:
        with self._lock:
            if self.store.get(sid) is not session:  # finished or dropped meanwhile
                raise session_closed()
            self.manager.record_turn(sid, turn=turn, prompt_messages=asked[0], response_message=said, metadata=meta)
        if self.debug_callback is None:
            return
        try:
            self.debug_callback(sid, *asked, said, turn)
        except Exception:
            logger.exception("session %r: the debug_callback raised", sid)


async def call_sglang_generate(
    prompt_ids: Sequence[int],
    session: Session,
    body: Mapping[str, Any],
    *,
    adapter: BaseAdapter,
    session_id: str | None = None,
    images: Sequence[str] = (),
) -> TurnRecord:
    """Generate one answer on the engines behind ``adapter.sglang_url``; ``images`` are those of the prompt.

    A prompt that fills the context is not sent: its answer is empty and ends with ``length``. Engines that abort for a
    weight sync are resumed from their tokens. Requests of a session carry its id as routing key. When
    this is cancelled, or takes too long, the request is aborted on the engine. Raises HttpRequestError (a RuntimeError)
    for a request that is refused.
    """
    params = sampling_params(
        session.sampling_defaults, body, stop_keys=adapter.stop_keys, max_tokens_keys=adapter.max_tokens_keys
    )
    more, forbidden = session.images.extra(images), forbidden_ids(adapter)
    if session.max_context_tokens > 0:
        room = session.max_context_tokens - len(prompt_ids) - more
        if room <= 0:
            return TurnRecord(list(prompt_ids), [], "length")
        params["max_new_tokens"] = min(params["max_new_tokens"], room)
    headers = {"X-SMG-Routing-Key": session_id} if session_id and session_id != DEFAULT_SID else None
    replies = Replies(list(prompt_ids), adapter.replay, more)
    stalled = 0
    while True:
        payload = {
            "rid": uuid.uuid4().hex,
            "input_ids": replies.tokens,
            "sampling_params": left_of(params, replies),
            "return_logprob": True,
            **({"image_data": [session.images.seen[image].png for image in images]} if images else {}),
            **({} if adapter.replay is None else asked_fields(["return_routed_experts"])),
        }
        payload = without_placeholders(payload, forbidden)
        reply = generated(await post(f"{adapter.sglang_url}/generate", payload, headers=headers))
        _check_placeholders(reply, len(replies.tokens) + more if images else None, forbidden)
        new = replies.add(reply)
        if replies.finish_reason != "abort" or replies.output_length >= params["max_new_tokens"]:
            return replies.turn()
        stalled = 0 if new else stalled + 1
        if stalled > MAX_RESUMES_WITHOUT_PROGRESS:
            raise RuntimeError(
                f"the engines aborted a turn of session {session_id!r} {stalled} times without generating a token"
            )
        await asyncio.sleep(RESUME_PAUSE_S)


def _check_placeholders(reply: Generated, expected: int | None, forbidden: Sequence[int]) -> None:
    """Raise RuntimeError for a reply that shows that engine and gateway do not agree about images."""
    counted = reply.meta_info.get("prompt_tokens")
    if expected is not None and counted is not None and counted != expected:
        raise RuntimeError(
            f"the engine made {counted} tokens of a prompt with images, which has {expected} here: both must have the "
            "same processor files and --sglang-image-processor-backend"
        )
    if found := set(forbidden).intersection(reply.output_ids):
        raise RuntimeError(f"the engine generated token {min(found)}, a placeholder of images or videos")


def content_of(content: object) -> str | list[dict[str, Any]]:
    """The content of a message as text, or as parts where it has images: ``{"type": "image", "image": source}``."""
    blocks = content if isinstance(content, list) else []
    sources = [item_of("image", b) if isinstance(b, Mapping) and media_kind(b) == "image" else None for b in blocks]
    if not any(source is not None for source in sources):
        return flatten_content(content)
    parts: list[dict[str, Any]] = []
    for is_text, run in itertools.groupby(zip(blocks, sources, strict=True), lambda pair: pair[1] is None):
        if is_text:
            parts.append({"type": "text", "text": flatten_content([block for block, _ in run])})
        else:
            parts += [{"type": "image", "image": source} for _, source in run]
    return [part for part in parts if part["type"] == "image" or part["text"]]


def flatten_content(content: object) -> str:
    """The text of a message's content: a string, or blocks of which the text ones count, one per line."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"content must be a string or a list of blocks, not {type(content).__name__}")
    texts = []
    for block in content:
        if isinstance(block, str):
            texts.append(block)
        elif isinstance(block, Mapping) and isinstance(block.get("text"), str):
            texts.append(block["text"])
        else:
            kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
            told.tell("a content block of type %r is left out: only text is understood here", kind)
    return "\n".join(texts)


def tool_call_dict(name: str, arguments: object) -> dict[str, Any]:
    """A tool call as chat templates take it, without an id."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def manager_finish_reason(finish_reason: str, tool_uses: Sequence[Any]) -> str:
    """Return how a turn ended: ``tool_calls`` when it used a tool, else ``length`` or ``stop``."""
    if tool_uses:
        return "tool_calls"
    return "length" if finish_reason == "length" else "stop"


def sid_from_bearer(request: web.Request) -> str | None:
    """The session id in ``Authorization: Bearer``, if there is one."""
    kind, _, token = request.headers.get("Authorization", "").strip().partition(" ")
    return token.strip() or None if kind.lower() == "bearer" else None


def sid_from_body(body: Mapping[str, Any]) -> str | None:
    """The session id in ``metadata.session_id``, or in ``user``, or ``prompt_cache_key``, if there is one."""
    metadata = body.get("metadata")
    sid = metadata.get("session_id") if isinstance(metadata, Mapping) else None
    sid = sid or body.get("user") or body.get("prompt_cache_key")
    return sid if isinstance(sid, str) else None


async def _health(request: web.Request) -> web.Response:
    return web.json_response({"ok": True})


T = TypeVar("T")


class TextWorker:
    """One thread that renders prompts and parses answers.

    Templates and tokenizers are not for several threads at a time, and take too long for the event loop. Raises
    ValueError for parsers that SGLang does not have.
    """

    def __init__(self, tokenizer: Any, tool_parser: str | None, reasoning_parser: str | None) -> None:
        sglang_parsers.check_names(tool_parser, reasoning_parser)
        self.tokenizer = tokenizer
        self.tool_parser, self.reasoning_parser = tool_parser, reasoning_parser
        self._special = {getattr(tokenizer, "eos_token_id", None), *getattr(tokenizer, "all_special_ids", ())} - {None}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="agent-text")

    async def render(
        self, messages: list[Message], tools: list[Message] | None, known: Sequence[MessageNode] = ()
    ) -> tuple[list[int], Rendering | None]:
        """The prompt's token ids, with the model's own for answers in ``known``, and the template's version of it.

        Refuses messages that the chat template does not take.
        """
        return await self._run(self._prompt, messages, tools, known)

    async def parse(self, turn: TurnRecord, tools: list[Message] | None) -> ParsedModelOutput:
        """The parsed answer."""
        return await self._run(self._parse, turn, tools)

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens included."""
        return await self._run(self._decode, ids)

    def decode_with(self, tokenizer: Any) -> Callable[[Sequence[int]], Awaitable[str]]:
        """Return ``decode`` with another tokenizer, in the same thread."""
        return lambda ids: self._run(lambda: str(tokenizer.decode(list(ids), skip_special_tokens=False)))

    async def _run(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def _prompt(
        self, messages: list[Message], tools: list[Message] | None, known: Sequence[MessageNode]
    ) -> tuple[list[int], Rendering | None]:
        ids, eos = self._render(messages, tools), getattr(self.tokenizer, "eos_token_id", None)
        return with_own_tokens(ids, known, self._special, eos, self._decode), Rendering.of(ids, self._special)

    def _render(self, messages: list[Message], tools: list[Message] | None) -> list[int]:
        try:
            ids = self.tokenizer.apply_chat_template(
                messages, tools=tools or None, tokenize=True, add_generation_prompt=True
            )
        except Exception as e:
            raise bad_request(f"the chat template does not take these messages: {type(e).__name__}: {e}") from e
        return list(ids["input_ids"] if isinstance(ids, Mapping) else ids)

    def _parse(self, turn: TurnRecord, tools: list[Message] | None) -> ParsedModelOutput:
        ids = turn.output_ids
        if len(ids) and turn.finish_reason == "stop" and ids[-1] in self._special:
            ids = ids[:-1]  # the token that ended the output is no text
        return parse_model_output(
            self._decode(ids),
            tools_schema=tools,
            tool_parser_name=self.tool_parser,
            reasoning_parser_name=self.reasoning_parser,
        )

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

"""The log-prob server: a Megatron model without optimizer that answers HTTP requests with log-probs of tokens.

    python -m slime.backends.megatron_utils.server.megatron_server --hf-checkpoint DIRECTORY ...

All flags are those of a run; its ranks are those of the actor. Requests that arrive while the ranks compute make up
their next batch, which is divided among them as a step of training is.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import sys
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
import ray
from aiohttp import web

from slime.arguments.args import Args
from slime.arguments.command_line import flags_where
from slime.arguments.errors import ArgumentError
from slime.arguments.flag import CONVERTERS, KIND_WORDS
from slime.arguments.parse import exit_with, parse_args
from slime.arguments.rules import hf_config
from slime.arguments.rules.checkpoints import is_megatron_checkpoint
from slime.arguments.rules.roles import ACTOR, role_args
from slime.backends.megatron_utils.checkpoints.directory import find_checkpoint
from slime.batching.log_prob_requests import LogProbReply, LogProbRequest, shards_of_requests
from slime.observability import run_dir
from slime.observability.progress import Starting
from slime.ray import cluster, directories, space
from slime.ray.cluster import spans_one_host
from slime.ray.driver.placement_group import create_placement_groups
from slime.ray.driver.program import Terminated, handle_sigterm, run_as_program
from slime.ray.driver.serving import hand_over_key
from slime.ray.driver.train_group import RayTrainGroup
from slime.servers.auth import bearer_token, ensure_api_key, is_key
from slime.servers.bounded_site import RUNNER_OPTIONS, BoundedSite, Handler
from slime.servers.request_checks import RequestError, browser_guard, read_json
from slime.utils.network import get_current_node_ip, join_address
from slime.utils.plain import plain
from slime.utils.plain_numbers import is_integer, is_number
from slime.utils.secrets import mask_text

logger = logging.getLogger(__name__)

MAX_BODY = 64 << 20
MOST_DRAWS = 1024
MOST_NUMBERS = 2**22
"""Draws of a request, over all of its tokens."""
HEALTH = "/healthz"
"""Whoever waits for the server asks here, and needs no key."""
COMPUTE_DEADLINE_S = 3600.0
LIVENESS_INTERVAL_S = 1.0
SHUTDOWN_S = 5.0
"""So long a server that ends waits for answers to be sent."""
WARM = web.AppKey("warm", asyncio.Event)


@dataclass
class LogProbQueue:
    """Requests in the order of their arrival, and the one batch that is computed at a time.

    ``compute`` answers a batch, ``fits(requests)`` says whether it takes no more than the ranks hold at once.
    """

    compute: Callable[[Sequence[LogProbRequest]], Awaitable[list[LogProbReply]]]
    fits: Callable[[Sequence[LogProbRequest]], bool]
    closed: str | None = None
    """Why no requests are taken; None when they are."""
    running: list[LogProbRequest] = field(default_factory=list)
    _waiting: deque[tuple[LogProbRequest, asyncio.Future[LogProbReply]]] = field(default_factory=deque)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def ask(self, request: LogProbRequest) -> LogProbReply:
        """Return the reply to ``request``. Raises RequestError where none are taken."""
        if self.closed is not None:
            raise RequestError(503, self.closed)
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        async with self._changed:
            self._changed.notify_all()
        reply: LogProbReply = await future
        return reply

    async def run(self) -> None:
        """Answer requests until this is cancelled. What ``compute`` raises is the answer to all, and raised."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._waiting)
            batch = self._next_batch()
            if not batch:
                continue
            self.running = [request for request, _ in batch]
            try:
                replies = await self.compute(self.running)
            except BaseException as e:
                why = "the server ends" if isinstance(e, asyncio.CancelledError) else f"the model has failed: {e}"
                for _, future in [*batch, *self._waiting]:
                    if not future.done():
                        future.set_exception(RuntimeError(why))
                        future.exception()  # of a client that is gone
                raise
            finally:
                self.running = []
                async with self._changed:
                    self._changed.notify_all()
            for (_, future), reply in zip(batch, replies, strict=True):
                if not future.done():  # its client may be gone
                    future.set_result(reply)

    def _next_batch(self) -> list[tuple[LogProbRequest, asyncio.Future[LogProbReply]]]:
        """Take what waits, as much as fits, and one at least; not that of clients that are gone."""
        batch: list[tuple[LogProbRequest, asyncio.Future[LogProbReply]]] = []
        while self._waiting and (not batch or self.fits([r for r, _ in batch] + [self._waiting[0][0]])):
            one = self._waiting.popleft()
            if not one[1].done():
                batch.append(one)
        return batch

    async def idle(self) -> None:
        """Return when nothing waits or is computed."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._waiting and not self.running)

    def loads(self) -> dict[str, int]:
        """Return how many requests and tokens wait and are computed."""
        waiting = [request for request, future in self._waiting if not future.done()]
        pending, running = (sum(len(r.tokens) for r in requests) for requests in (waiting, self.running))
        return {
            "queue_size": len(waiting),
            "inflight_size": len(self.running),
            "total_size": len(waiting) + len(self.running),
            "pending_tokens": pending,
            "running_tokens": running,
            "total_tokens": pending + running,
        }


class Ranks:
    """The ranks that hold the model, as the server calls them: each call waits in a thread of ``_calls``."""

    def __init__(self, args: Args, group: RayTrainGroup) -> None:
        self.args, self._group = args, group
        self._config: dict[str, int] = group.call_ranks("layout", "asking for the layout", COMPUTE_DEADLINE_S)[0]
        self._liveness = group.liveness()
        self._calls = ThreadPoolExecutor(2, thread_name_prefix="ranks")
        self.running = [0] * self._config["dp_size"]
        """Requests that every data-parallel rank is at work on."""

    async def compute(self, requests: Sequence[LogProbRequest]) -> list[LogProbReply]:
        """Return the replies to ``requests``, in order."""
        shards, positions = shards_of_requests(self.args, self._config, requests)
        self.running = [len(shard.requests) for shard in shards]
        found = await self._call("served_log_probs", "computing log-probs", ray.put(shards))
        replies: dict[int, LogProbReply] = {}
        for dp_rank, part in filter(None, found):
            replies |= zip(positions[dp_rank], part, strict=True)
        self.running = [0] * len(shards)
        return [replies[i] for i in range(len(requests))]

    def fits(self, requests: Sequence[LogProbRequest]) -> bool:
        """Return whether ``requests`` are no more than one micro-batch per rank and pipeline stage.

        All tokens of a batch have as many labels and draws: requests for other numbers of them are another batch.
        """
        args, config = self.args, self._config
        if len({(request.labels.shape[1], request.draws) for request in requests}) > 1:
            return False
        micro_batches = config["dp_size"] * config["pp_size"] * config["vpp_size"]
        if not args.use_dynamic_batch_size:
            return len(requests) <= micro_batches * args.micro_batch_size
        limit = micro_batches * config["cp_size"] * (args.max_tokens_per_gpu or 0)
        return sum(len(request.tokens) for request in requests) <= limit

    async def load(self, path: str) -> None:
        """Replace the weights by those of a checkpoint."""
        await self._call("load_weights", f"loading {path}", path)

    async def _call(self, method: str, what: str, argument: object) -> list[Any]:
        loop = asyncio.get_running_loop()
        call = partial(self._group.call_ranks, method, what, COMPUTE_DEADLINE_S, argument)
        return await loop.run_in_executor(self._calls, call)

    async def watch(self) -> None:
        """Raise when a rank has ended; until then this does not return."""
        while True:
            await asyncio.sleep(LIVENESS_INTERVAL_S)
            self._liveness.check("answering requests")

    def let_go(self) -> None:
        """Wait for no call any more: those at work end with the ranks."""
        self._calls.shutdown(wait=False, cancel_futures=True)


@dataclass
class WeightUpdates:
    """Weights from checkpoints, loaded between batches, one at a time.

    ``load`` replaces the weights; what it raises ends the server, as the weights are those of no checkpoint then.
    """

    args: Args
    queue: LogProbQueue
    load: Callable[[str], Awaitable[None]]
    loaded: object
    failed: asyncio.Future[None]
    _at_work: tuple[str, asyncio.Task[dict[str, Any]]] | None = None

    async def update(self, path: str, timeout_s: float) -> dict[str, Any]:
        """Load ``path`` when all requests are answered, for at most ``timeout_s``. Raises RequestError."""
        path = os.path.abspath(path)
        if self._at_work is not None:
            other, task = self._at_work
            if other != path:
                raise RequestError(409, f"weights are being loaded from {other}; ask again afterwards")
            return {**await asyncio.shield(task), "coalesced": True}
        content = checkpoint_content(self.args, path)
        if content == self.loaded:
            return {"ok": True, "path": path, "skipped": True}
        task = asyncio.create_task(self._replace(path, content, timeout_s))
        self._at_work = path, task
        task.add_done_callback(self._done)
        return await asyncio.shield(task)  # it continues when whoever asked is gone

    def _done(self, task: asyncio.Task[dict[str, Any]]) -> None:
        self._at_work = None

    async def _replace(self, path: str, content: object, timeout_s: float) -> dict[str, Any]:
        self.queue.closed = f"weights are being loaded from {path}"
        try:
            async with asyncio.timeout(timeout_s):
                await self.queue.idle()
        except TimeoutError:
            self.queue.closed = None
            raise RequestError(503, f"requests are not answered after {timeout_s:g} s, and the weights stay") from None
        try:
            await self.load(path)
        except Exception as e:
            self.queue.closed = f"{path} could not be loaded, and the server ends"
            if not self.failed.done():
                self.failed.set_exception(e)
            raise
        self.loaded, self.queue.closed = content, None
        logger.info("weights loaded from %s", path)
        return {"ok": True, "path": path}


def checkpoint_content(args: Args, path: str) -> object:
    """Return what tells the weights at ``path`` from others that are written there later.

    Raises RequestError for what is no checkpoint, or one of another architecture.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise RequestError(400, f"{path} is no directory on the server's host")
    try:
        if is_megatron_checkpoint(path):
            directory, _ = find_checkpoint(path)
        elif (directory / "config.json").is_file():
            if wrong := hf_config.differences(args, hf_config.read_config(path, "model_path")):
                raise RequestError(400, f"{path} is of another architecture: {'; '.join(wrong)}")
        else:
            raise RequestError(400, f"{path} has neither a Megatron checkpoint nor a config.json")
    except (ArgumentError, OSError, ValueError) as e:
        raise RequestError(400, f"{path} cannot be read: {e}") from e
    files = sorted(file for file in directory.rglob("*") if file.is_file())
    return str(directory.resolve()), [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def read_request(args: Args, body: object) -> LogProbRequest:
    """Return the request in the ``body`` of /generate. Raises RequestError naming the field."""
    if not isinstance(body, dict):
        raise RequestError(400, f"expected an object, got {type(body).__name__}")
    if body.get("image_data"):
        raise RequestError(400, "image_data: this server takes no images")
    ids = _ids(body.get("input_ids"), vocabulary(args), "input_ids")
    if not ids:
        raise RequestError(400, "input_ids: expected at least one token")
    draws = body.get("sample_n") or 0
    if not is_integer(draws) or not 0 <= draws <= MOST_DRAWS:
        raise RequestError(400, f"sample_n: expected an integer from 0 to {MOST_DRAWS}, got {draws!r:.50}")
    if draws * len(ids) > MOST_NUMBERS:
        raise RequestError(
            400, f"sample_n: {draws} draws for {len(ids)} tokens are more than {MOST_NUMBERS}; ask in parts"
        )
    labels = body.get("label_token_ids") or []
    if labels and (not isinstance(labels, list) or len(labels) != len(ids) - 1):
        raise RequestError(400, f"label_token_ids: expected {len(ids) - 1} lists, one per token after the first")
    rows = [_ids(row, vocabulary(args), f"label_token_ids[{i}]") for i, row in enumerate(labels)]
    if len({len(row) for row in rows}) > 1:
        raise RequestError(400, "label_token_ids: all lists must have as many ids")
    sampling = body.get("sampling_params")
    temperature = sampling.get("temperature") if isinstance(sampling, dict) else None
    if temperature is not None and temperature != args.rollout_temperature:
        raise RequestError(
            400,
            f"sampling_params.temperature: this server computes at --rollout-temperature {args.rollout_temperature:g}, "
            f"got {temperature!r:.50}",
        )
    return LogProbRequest.of(ids, rows, draws, seed=random.getrandbits(62))


def vocabulary(args: Args) -> int:
    """Return the number of token ids of the model."""
    return int(args.vocab_size or args.padded_vocab_size or 0)


def _ids(value: object, size: int, name: str) -> list[int]:
    if not isinstance(value, list):
        raise RequestError(400, f"{name}: expected a list of token ids, got {type(value).__name__}")
    wrong = next((token for token in value if not is_integer(token) or not 0 <= token < size), None)
    if wrong is not None or None in value:
        raise RequestError(400, f"{name}: expected token ids from 0 to {size - 1}, got {wrong!r:.50}")
    return value


def make_app(
    args: Args, queue: LogProbQueue, updates: WeightUpdates, key: str, *, running: Callable[[], list[int]]
) -> web.Application:
    """Return the application. All but ``HEALTH`` needs ``key`` as bearer token; ``running`` is that of ``Ranks``."""

    async def detect(request: web.Request) -> web.Response:
        return _answer({"server_type": "megatron_server"})

    async def health(request: web.Request) -> web.Response:
        why = queue.closed if request.app[WARM].is_set() else "the server warms up"
        return _answer({"ok": True}) if why is None else _refusal(503, why)

    async def info(request: web.Request) -> web.Response:
        return _answer({"args": plain("", args)})

    async def loads(request: web.Request) -> web.Response:
        return _answer({**queue.loads(), "running_by_worker": dict(enumerate(running()))})

    async def generate(request: web.Request) -> web.Response:
        asked = await asyncio.to_thread(read_request, args, await read_json(request))
        limit, length = args.megatron_server_max_length, len(asked.tokens)
        if limit and length > limit:
            message = f"{length} tokens are more than --megatron-server-max-length {limit}"
            return _answer({"error": message, "input_length": length, "max_length": limit}, 413)
        if length == 1:
            reply = LogProbReply(*(np.empty(shape) for shape in ((0,), (0, 0), (0, asked.draws), (0, asked.draws))))
        else:
            reply = await queue.ask(asked)
        return _answer(await asyncio.to_thread(_as_json, asked, reply))

    async def update(request: web.Request) -> web.Response:
        body = await read_json(request)
        if not isinstance(body, dict):
            raise RequestError(400, f"expected an object, got {type(body).__name__}")
        path = next((body[name] for name in ("model_path", "path", "load") if body.get(name)), None)
        timeout_s = body.get("timeout_s", args.megatron_server_update_timeout_s)
        if not isinstance(path, str):
            raise RequestError(400, "model_path: expected the directory of a checkpoint")
        if not is_number(timeout_s) or timeout_s <= 0:
            raise RequestError(400, f"timeout_s: expected seconds, more than 0, got {timeout_s!r:.50}")
        return _answer(await updates.update(path, float(timeout_s)))

    app = web.Application(client_max_size=MAX_BODY, middlewares=[browser_guard(_refusal), _errors, _guard(key)])
    for path, handler in (("/detect", detect), (HEALTH, health), ("/info", info), ("/get_loads", loads)):
        app.router.add_get(path, handler)
    app[WARM] = asyncio.Event()
    app.router.add_post("/generate", generate)
    app.router.add_post("/update_weights_from_disk", update)
    return app


def _as_json(asked: LogProbRequest, reply: LogProbReply) -> dict[str, Any]:
    """Return the body for ``reply``. Raises ValueError when the model's log-probs are not finite."""
    if not all(np.isfinite(v).all() for v in (reply.log_probs, reply.label_log_probs, reply.sampled_log_probs)):
        raise ValueError("the model's log-probs are not finite")
    body: dict[str, Any] = {"request_id": uuid.uuid4().hex, "log_probs": reply.log_probs.tolist()}
    if asked.draws:
        body["sampled_token_ids"] = reply.sampled_ids.tolist()
        body["sampled_log_probs"] = reply.sampled_log_probs.tolist()
    if asked.labels.size:
        body["label_token_log_probs"] = reply.label_log_probs.tolist()
    return body


def _guard(key: str) -> Any:
    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path != HEALTH and not is_key(bearer_token(request.headers.get("Authorization")), key):
            return _refusal(401, "give the server's key, of <run_dir>/api_key or SLIME_SGLANG_API_KEY, as bearer token")
        return await handler(request)

    return middleware


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestError as e:
        return _refusal(e.status, e.message)
    except web.HTTPException as e:
        return _refusal(e.status, e.text or e.reason)
    except Exception as e:
        logger.exception("%s failed", request.path)
        return _refusal(500, mask_text(f"{type(e).__name__}: {e}"))


def _refusal(status: int, message: str) -> web.Response:
    return _answer({"ok": False, "error": message}, status)


def _answer(value: object, status: int = 200) -> web.Response:
    body = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS, default=str)
    return web.Response(body=body, status=status, content_type="application/json")


async def _warm_up(args: Args, address: str, key: str, warm: asyncio.Event) -> None:
    """Have one request answered. Raises TimeoutError after ``--teacher-warmup-timeout-s``."""
    if args.megatron_server_warmup is not False:
        tokens = [token % vocabulary(args) for token in (101, 102, 103, 104)]
        timeout = aiohttp.ClientTimeout(total=args.teacher_warmup_timeout_s)
        headers = {"Authorization": f"Bearer {key}"}
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session:
                async with session.post(f"{address}/generate", json={"input_ids": tokens}, headers=headers) as reply:
                    if reply.status != 200:
                        raise RuntimeError(f"warming up: {address} answered {reply.status}: {await reply.text():.500}")
        except TimeoutError as e:
            raise TimeoutError(
                f"warming up: {address} has not answered within --teacher-warmup-timeout-s "
                f"{args.teacher_warmup_timeout_s}"
            ) from e
    warm.set()


async def _serve(args: Args, ranks: Ranks, key: str) -> signal.Signals:
    """Answer requests until a signal arrives, and return it. Raises what ends the server otherwise."""
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[signal.Signals] = loop.create_future()
    hurried = asyncio.Event()

    def stop(signum: signal.Signals) -> None:
        if stopped.done():
            hurried.set()
        else:
            stopped.set_result(signum)

    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, stop, signum)
    queue = LogProbQueue(ranks.compute, ranks.fits)
    updates = WeightUpdates(args, queue, ranks.load, loaded=None, failed=loop.create_future())
    app = make_app(args, queue, updates, key, running=lambda: ranks.running)
    runner = web.AppRunner(app, **RUNNER_OPTIONS, access_log=None, shutdown_timeout=SHUTDOWN_S)
    host = address_to_listen_on()
    tasks: list[asyncio.Future[Any]] = [stopped, updates.failed]
    try:
        await runner.setup()
        try:
            await BoundedSite(runner, host, args.teacher_port).start()
        except OSError as e:
            raise OSError(f"--teacher-port {args.teacher_port}: {host} cannot be listened on: {e}") from e
        warming = asyncio.ensure_future(
            _warm_up(args, f"http://{join_address(host, args.teacher_warmup_port)}", key, app[WARM])
        )
        tasks += [asyncio.ensure_future(queue.run()), asyncio.ensure_future(ranks.watch()), warming]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if done == {warming}:
            warming.result()
            tasks.remove(warming)
            address = f"http://{join_address(host, args.teacher_port)}"
            print(f"log-probs of {args.hf_checkpoint}: {address}/generate", flush=True)
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        queue.closed = "the server ends"
        await _drain(queue, args.drain_timeout, hurried)
        return stopped.result()
    finally:
        for task in tasks:
            task.cancel()
        ranks.let_go()
        await runner.cleanup()


async def _drain(queue: LogProbQueue, timeout_s: float, hurried: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(wait) for wait in (queue.idle(), hurried.wait())]
    done, _ = await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    if waits[0] not in done:
        left = queue.loads()["total_size"]
        logger.warning("%d requests are not answered after %g s (--drain-timeout), and end now", left, timeout_s)


def address_to_listen_on() -> str:
    """Return loopback where all is on this host, unless ``SLIME_HOST_IP`` says by which address others reach it."""
    return "127.0.0.1" if spans_one_host() and not os.environ.get("SLIME_HOST_IP") else get_current_node_ip()


def serve_log_probs(args: Args) -> None:
    """Start the ranks that ``args`` describe and answer requests until a signal ends the server.

    Requests in flight are answered first, for at most ``--drain-timeout`` seconds. Nothing is left afterwards.
    """
    directories.hold(args)
    path = run_dir.prepare(args)
    space.look(args)
    logger.info("run directory: %s", path)
    start = Starting()
    try:
        start.waits_for("Ray, and the slots of the ranks")
        slots = create_placement_groups(args)["actor"]
        handle_sigterm()  # Ray has put its own handler there
        start.waits_for("the ranks, which load the model")
        of_actor = role_args(args, ACTOR)
        group = RayTrainGroup(of_actor, args.actor_num_nodes, args.actor_num_gpus_per_node, slots)
        group.create()
        given = args.sglang_api_key
        key = ensure_api_key(args)
        if given is None:
            hand_over_key(path / "api_key", key)
        start.done()
        signum = asyncio.run(_serve(of_actor, Ranks(of_actor, group), key))
        raise Terminated if signum == signal.SIGTERM else KeyboardInterrupt
    finally:
        if cluster.is_connected():
            cluster.current().shutdown()
        directories.release()


def words_of_variables(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the flags that variables of the environment give and ``words`` do not.

    Raises ArgumentError for a value that the flag does not take.
    """
    found: list[str] = []
    for flag in flags_where(lambda traits: traits.variable):
        value = environ.get(flag.traits.variable or "")
        if not value or any(word.split("=")[0] in flag.options for word in words):
            continue
        try:
            CONVERTERS[flag.kind](value)
        except ValueError as e:
            raise ArgumentError(
                f"the variable {flag.traits.variable} gives {flag.option}: expected {KIND_WORDS[flag.kind]}, got "
                f"{value!r}; unset it, or give the flag"
            ) from e
        if flag.action == "tristate":
            yes, no = flag.options
            found.append(yes if value.lower() in ("true", "1", "yes", "y", "on") else no)
        else:
            found += [flag.option, value]
    return found


def main() -> int:
    """Run the server with the command line; return its exit status."""
    words = sys.argv[1:]
    sys.argv[0] = "megatron_server"  # in messages, and in the command line that the run directory keeps
    try:
        args = parse_args([*words_of_variables(words, os.environ), *words], log_probs=True)
    except ArgumentError as error:
        exit_with(error)
    return run_as_program(args, partial(serve_log_probs, args))


if __name__ == "__main__":
    sys.exit(main())

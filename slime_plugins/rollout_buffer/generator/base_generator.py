"""A generator of single-turn answers to mathematical questions, and the base of generators of your own."""

from __future__ import annotations

import inspect
import json
import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any

import requests

from slime.rollout.rm_hub.math_utils import grade_answer_verl
from slime.servers.key_file import key_for
from slime.utils.data import read_file

logger = logging.getLogger(__name__)

TASK_TYPE = "math"
ATTEMPTS = 3
"""So often an item is tried before it is handed in as failed."""
WRITE_ATTEMPTS = 60
MOST_REFUSED = 100
"""So many trajectories in a row that the buffer cannot use are the generator's fault, and end it."""
TIMEOUT_S = 1800.0

Item = dict[str, Any]
Messages = list[dict[str, Any]]
RolloutFunction = Callable[..., Messages]
"""``fn(client, messages, sampling_params)``, which is also given the ``item`` if it has a parameter of that name."""
RewardFunction = Callable[[Item], Any]


class Reply(SimpleNamespace):
    """An object of a JSON reply: its keys are attributes, and those that it lacks are None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class ChatClient:
    """Asks the engines' OpenAI-compatible address. Threads may share it.

    ``client.chat.completions.create(messages=..., ...)`` is called and answers as that of the package openai, which
    takes its place where streams are needed.
    """

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._of_thread = threading.local()
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    @property
    def finish_reason(self) -> str | None:
        """Why the last answer of this thread ended (``stop``, ``length``); None before the first."""
        return getattr(self._of_thread, "finish_reason", None)

    @finish_reason.setter
    def finish_reason(self, reason: str | None) -> None:
        self._of_thread.finish_reason = reason

    def _create(
        self,
        *,
        messages: Messages,
        model: str = "slime",
        stream: bool = False,
        extra_body: dict[str, Any] | None = None,
        extra_headers: dict[str, str] | None = None,
        timeout: float = TIMEOUT_S,
        **params: object,
    ) -> Reply:
        """Return the engine's reply. Raises requests' errors, ValueError for a stream."""
        if stream:
            raise ValueError("this client reads whole answers: leave stream=True out, or use openai.OpenAI")
        if not hasattr(self._of_thread, "session"):
            self._of_thread.session = requests.Session()
        given = {name: value for name, value in params.items() if value is not None}
        body = {"model": model, "messages": messages, **given, **(extra_body or {})}
        url = f"{self.base_url}/v1/chat/completions"
        headers = {"Content-Type": "application/json", **self._headers, **(extra_headers or {})}
        text = json.dumps(body, default=vars)  # messages of earlier replies are appended as they are
        answer = self._of_thread.session.post(url, data=text, headers=headers, timeout=timeout)
        if answer.status_code >= 400:
            raise requests.HTTPError(f"{url} answered {answer.status_code}: {answer.text[:500]}", response=answer)
        reply: Reply = answer.json(object_hook=lambda found: Reply(**found))
        self.finish_reason = str(reply.choices[0].finish_reason or "stop")
        return reply


class BaseGenerator:
    """Runs a rollout function and a reward function on every item of a file, ``num_process`` at a time.

    Every item gives ``num_repeat_per_sample`` trajectories per epoch, written to the buffer as they come. Each entry of
    ``skip_instance_ids`` leaves its item out of one epoch: those that earlier starts of the run have trained on.
    """

    def __init__(
        self,
        remote_engine_url: str,
        remote_buffer_url: str,
        num_repeat_per_sample: int = 1,
        queue_size: int = 1_000_000,
        num_process: int = 10,
        task_type: str = TASK_TYPE,
        max_tokens: int = 4096,
        num_repeats: int = 10,
        skip_instance_ids: Sequence[str] | None = None,
        sampling_params: dict[str, Any] | None = None,
        engine_api_key: str | None = None,
    ) -> None:
        self.remote_engine_url, self.remote_buffer_url = remote_engine_url, remote_buffer_url.rstrip("/")
        self.num_repeat_per_sample, self.num_repeats = num_repeat_per_sample, num_repeats
        self.queue_size, self.num_process, self.task_type = queue_size, num_process, task_type
        self.max_tokens = max_tokens
        self.sampling_params = {"max_tokens": max_tokens, **(sampling_params or {})}
        self.skip_instance_ids = list(skip_instance_ids or [])
        self.client = ChatClient(remote_engine_url, engine_api_key)
        self._refused_in_a_row = 0

    def entry(
        self, input_file: str, rollout_func: RolloutFunction, reward_func: RewardFunction, num_epoch: int = 1
    ) -> None:
        """``run`` for every epoch, without what is to be skipped."""
        left = Counter(str(instance_id) for instance_id in self.skip_instance_ids)
        for _ in range(num_epoch):
            skipped = {instance_id for instance_id, count in left.items() if count > 0}
            left.subtract(skipped)
            self._run(input_file, rollout_func, reward_func, skipped)

    def run(self, input_file: str, rollout_func: RolloutFunction, reward_func: RewardFunction) -> None:
        """One epoch."""
        self._run(input_file, rollout_func, reward_func, set(self.skip_instance_ids))

    def items(self, input_file: str) -> Iterator[Item]:
        """The items of a prompt file; one without an ``instance_id`` is named after its place."""
        for number, row in enumerate(read_file(input_file)):
            yield {**row, "instance_id": str(row.get("instance_id", number))}

    def send_data_to_buffer(self, data: Item) -> None:
        """Write one trajectory; wait while the buffer is full or does not answer. Raises when that takes too long.

        One that the buffer cannot use (400) is logged and left out, as the others may be good, but not ``MOST_REFUSED``
        in a row.
        """
        key = key_for(self.remote_buffer_url)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        for attempt in range(WRITE_ATTEMPTS):
            try:
                reply = requests.post(f"{self.remote_buffer_url}/buffer/write", json=data, headers=headers, timeout=60)
            except (requests.ConnectionError, requests.Timeout) as e:
                said = str(e)
            else:
                if reply.status_code < 400:
                    self._refused_in_a_row = 0
                    return
                said = f"{reply.status_code}: {reply.text[:500]}"
                if reply.status_code == 400:
                    logger.error("the buffer refused trajectory %r: %s", data.get("uid"), said)
                    self._refused_in_a_row += 1
                    if self._refused_in_a_row < MOST_REFUSED:
                        return
                    said = f"{self._refused_in_a_row} in a row, the last one with {said}"
                if reply.status_code not in (429, 502, 503, 504):
                    raise RuntimeError(f"the buffer at {self.remote_buffer_url} refused a trajectory: {said}")
            time.sleep(min(5.0, 0.1 * 2 ** min(attempt, 10)))
        raise RuntimeError(f"the buffer at {self.remote_buffer_url} took no trajectory: {said}")

    def trajectory(self, item: Item, rollout_func: RolloutFunction, reward_func: RewardFunction) -> Item:
        """Return what is written of one item: messages and reward, or, after its last attempt, why there are none."""
        work = {**item, "uid": str(uuid.uuid4()), "sampling_params": dict(self.sampling_params)}
        extra: dict[str, Any] = {"timestamp": time.time()}
        more = {"item": work} if "item" in inspect.signature(rollout_func).parameters else {}
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self.client.finish_reason = None
                work["messages"] = rollout_func(self.client, chat(work), dict(self.sampling_params), **more)
                work["reward"] = reward_func(work)
                break
            except Exception as e:  # noqa: BLE001  (it costs this item, and is handed in with it)
                logger.warning("item %s, attempt %d of %d: %r", item["instance_id"], attempt, ATTEMPTS, e)
                error = f"{type(e).__name__}: {e}"
        else:
            work |= {"messages": [*chat(item), {"role": "assistant", "content": ""}], "reward": 0.0}
            extra["error"] = error
        extra["round_number"] = sum(message["role"] == "assistant" for message in work["messages"])
        if (reason := work.get("finish_reason", self.client.finish_reason)) is not None:
            extra["finish_reason"] = reason
        names = ("uid", "instance_id", "messages", "reward")
        return {**{name: work[name] for name in names}, "extra_info": extra}

    def _run(
        self, input_file: str, rollout_func: RolloutFunction, reward_func: RewardFunction, skipped: set[str]
    ) -> None:
        def work(item: Item) -> None:
            self.send_data_to_buffer(self.trajectory(item, rollout_func, reward_func))

        with ThreadPoolExecutor(self.num_process) as threads:
            running: set[Future[None]] = set()
            try:
                for item in self.items(input_file):
                    if item["instance_id"] in skipped:
                        continue
                    for _ in range(self.num_repeat_per_sample):
                        running.add(threads.submit(work, item))
                        if len(running) >= 2 * self.num_process:
                            running = _without_done(running)
                while running:
                    running = _without_done(running)
            except BaseException:  # Ctrl-C too: the pool would otherwise finish all items first
                threads.shutdown(wait=False, cancel_futures=True)
                raise


def _without_done(running: set[Future[None]]) -> set[Future[None]]:
    done, running = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        future.result()
    return running


def chat(item: Item) -> Messages:
    """Return the prompt of an item as chat messages."""
    prompt = item[item.get("input_key") or next(key for key in ("prompt", "input", "question", "text") if key in item)]
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def query_single_turn(
    client: ChatClient, messages: Messages, sampling_params: dict[str, Any], tools: list[dict[str, Any]] | None = None
) -> Messages:
    """Ask once; return the conversation with the answer."""
    reply = client.chat.completions.create(messages=messages, model="slime", tools=tools, **sampling_params)
    return [*messages, {"role": "assistant", "content": reply.choices[0].message.content or ""}]


def get_rule_based_math_reward(item: Item) -> int:
    """Return 1 when the last box of the last message equals the item's label, else 0."""
    return int(grade_answer_verl(item["messages"][-1]["content"], item.get("label")))


def run_rollout(data: dict[str, Any]) -> None:
    """Answer every question of ``data["input_file"]``; what the buffer calls with what ``/start_rollout`` was sent."""
    columns = {"input_key": data.get("input_key"), "label_key": data.get("label_key")}

    class Generator(BaseGenerator):
        def items(self, input_file: str) -> Iterator[Item]:
            for item in super().items(input_file):
                label = item.get(columns["label_key"] or "label")
                yield {**item, "input_key": columns["input_key"], "label": label}

    generator = Generator(
        data["remote_engine_url"],
        data["remote_buffer_url"],
        num_repeat_per_sample=int(data["num_repeat_per_sample"]),
        num_process=int(data.get("num_process") or 10),
        task_type=data["task_type"],
        max_tokens=int(data["sampling_params"]["max_tokens"]),
        skip_instance_ids=data.get("skip_instance_ids"),
        sampling_params=data["sampling_params"],
        engine_api_key=data.get("engine_api_key"),
    )
    generator.entry(data["input_file"], query_single_turn, get_rule_based_math_reward, int(data.get("num_epoch") or 1))

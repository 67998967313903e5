"""The log-prob server's queue, its updates of weights, and what the environment gives."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime.arguments import ArgumentError, parse_args
from slime.batching.log_prob_requests import LogProbReply, LogProbRequest, shards_of_requests
from slime.ray.driver import log_prob_server
from slime.ray.driver.log_prob_server import LogProbQueue, WeightUpdates, words_of_variables
from slime.servers.request_checks import RequestError
from tools.tiny_model import make_tiny_checkpoint, megatron_flags

NOTHING = np.empty((0, 0))


def reply_to(request: LogProbRequest) -> LogProbReply:
    """Return a reply that only this request has."""
    return LogProbReply(request.tokens.astype(float), NOTHING, NOTHING, NOTHING)


class Ranks:
    """Computes batches of at most ``tokens`` tokens, each when it is let."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.batches, self.let = tokens, [], asyncio.Semaphore(0)
        self.batches: list[list[int]] = []

    def fits(self, requests: Sequence[LogProbRequest]) -> bool:
        return sum(len(request.tokens) for request in requests) <= self.tokens

    async def compute(self, requests: Sequence[LogProbRequest]) -> list[LogProbReply]:
        self.batches.append([len(request.tokens) for request in requests])
        await self.let.acquire()
        return [reply_to(request) for request in requests]


def in_loop(body: Callable[[LogProbQueue, Ranks], Awaitable[None]], tokens: int = 10) -> None:
    async def run() -> None:
        ranks = Ranks(tokens)
        queue = LogProbQueue(ranks.compute, ranks.fits)
        running = asyncio.create_task(queue.run())
        async with asyncio.timeout(10):
            await body(queue, ranks)
        running.cancel()

    asyncio.run(run())


def ask(queue: LogProbQueue, *tokens: int) -> asyncio.Task[LogProbReply]:
    return asyncio.create_task(queue.ask(LogProbRequest.of(tokens)))


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_what_waits_is_the_next_batch_as_far_as_it_fits() -> None:
    async def body(queue: LogProbQueue, ranks: Ranks) -> None:
        first = ask(queue, 1, 2)
        await settled()
        others = [ask(queue, 3, 4, 5), ask(queue, *range(20)), ask(queue, 6, 7, 8, 9), ask(queue, 10, 11)]
        await settled()
        assert queue.loads() == {
            "queue_size": 4, "inflight_size": 1, "total_size": 5, "pending_tokens": 29, "running_tokens": 2,
            "total_tokens": 31,
        }  # fmt: skip
        for _ in range(4):
            ranks.let.release()
        replies = await asyncio.gather(first, *others)
        assert [len(reply.log_probs) for reply in replies] == [2, 3, 20, 4, 2]
        assert replies[3].log_probs.tolist() == [6, 7, 8, 9]
        assert ranks.batches == [[2], [3], [20], [4, 2]]  # one that is too long for the ranks is alone

    in_loop(body)


def test_nothing_is_computed_for_clients_that_are_gone() -> None:
    async def body(queue: LogProbQueue, ranks: Ranks) -> None:
        first, gone, last = ask(queue, 1, 2), ask(queue, 3, 4, 5), ask(queue, 6, 7, 8, 9)
        await settled()
        gone.cancel()
        first.cancel()  # it is being computed already
        await settled()
        ranks.let.release()
        ranks.let.release()
        assert (await last).log_probs.tolist() == [6, 7, 8, 9]
        await queue.idle()

    in_loop(body)


def test_a_model_that_fails_fails_all_requests_and_the_queue() -> None:
    async def run() -> None:
        async def compute(requests: Sequence[LogProbRequest]) -> list[LogProbReply]:
            await settled()
            raise MemoryError("out of memory")

        queue = LogProbQueue(compute, lambda requests: len(requests) < 2)
        running = asyncio.create_task(queue.run())
        asked = [ask(queue, 1, 2), ask(queue, 3, 4)]
        found = await asyncio.wait_for(asyncio.gather(*asked, running, return_exceptions=True), 10)
        assert [str(error) for error in found[:2]] == ["the model has failed: out of memory"] * 2
        assert isinstance(found[2], MemoryError)

    asyncio.run(run())


@pytest.fixture
def contents(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """By path, what ``checkpoint_content`` tells a checkpoint by."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(log_prob_server, "checkpoint_content", lambda args, path: found.get(path, path))
    return found


def updates_of(queue: LogProbQueue, load: Callable[[str], Awaitable[None]]) -> WeightUpdates:
    return WeightUpdates(Namespace(), queue, load, loaded=None, failed=asyncio.get_running_loop().create_future())


def test_weights_are_loaded_between_batches_and_once(contents: dict[str, Any]) -> None:
    async def body(queue: LogProbQueue, ranks: Ranks) -> None:
        loaded: list[str] = []

        async def load(path: str) -> None:
            assert not queue.running
            loaded.append(path)
            await settled()

        updates = updates_of(queue, load)
        asked = ask(queue, 1, 2)
        await settled()
        same = [asyncio.create_task(updates.update("/a", 5)) for _ in range(2)]
        await settled()
        assert loaded == []  # a request is being answered
        with pytest.raises(RequestError, match="weights are being loaded from /a") as refused:
            await queue.ask(LogProbRequest.of([1, 2]))
        assert refused.value.status == 503
        with pytest.raises(RequestError, match="from /a; ask again") as refused:
            await updates.update("/b", 5)
        assert refused.value.status == 409
        ranks.let.release()
        await asked
        assert await asyncio.gather(*same) == [
            {"ok": True, "path": "/a"}, {"ok": True, "path": "/a", "coalesced": True},
        ]  # fmt: skip
        assert await updates.update("/a", 5) == {"ok": True, "path": "/a", "skipped": True}
        assert loaded == ["/a"]
        contents["/a"] = "written again"
        assert await updates.update("/a", 5) == {"ok": True, "path": "/a"}
        ranks.let.release()
        await queue.ask(LogProbRequest.of([1, 2]))

    in_loop(body)


def test_weights_stay_when_requests_are_not_answered_in_time(contents: dict[str, Any]) -> None:
    async def body(queue: LogProbQueue, ranks: Ranks) -> None:
        async def load(path: str) -> None:
            raise AssertionError("not idle")

        asked = ask(queue, 1, 2)
        await settled()
        with pytest.raises(RequestError, match=r"not answered after 0\.01 s, and the weights stay") as refused:
            await updates_of(queue, load).update("/a", 0.01)
        assert refused.value.status == 503
        ranks.let.release()
        await asked
        ranks.let.release()
        await queue.ask(LogProbRequest.of([1, 2]))

    in_loop(body)


def test_weights_that_are_half_loaded_end_the_server(contents: dict[str, Any]) -> None:
    async def body(queue: LogProbQueue, ranks: Ranks) -> None:
        async def load(path: str) -> None:
            raise OSError("cut off")

        updates = updates_of(queue, load)
        with pytest.raises(OSError, match="cut off"):
            await updates.update("/a", 5)
        assert isinstance(updates.failed.exception(), OSError)
        with pytest.raises(RequestError, match="the server ends"):
            await queue.ask(LogProbRequest.of([1, 2]))

    in_loop(body)


def test_an_update_is_completed_when_whoever_asked_is_gone(contents: dict[str, Any]) -> None:
    async def body(queue: LogProbQueue, ranks: Ranks) -> None:
        loaded: list[str] = []

        async def load(path: str) -> None:
            await settled()
            loaded.append(path)

        updates = updates_of(queue, load)
        asked = asyncio.create_task(updates.update("/a", 5))
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="from /a; ask again"):
            await updates.update("/b", 5)
        await settled()
        await settled()
        assert loaded == ["/a"]
        assert await updates.update("/b", 5) == {"ok": True, "path": "/b"}

    in_loop(body)


def test_requests_for_other_numbers_of_labels_and_draws_are_another_batch() -> None:
    ranks = log_prob_server.Ranks.__new__(log_prob_server.Ranks)
    ranks.args = Namespace(use_dynamic_batch_size=True, max_tokens_per_gpu=10)  # type: ignore[assignment]
    ranks._config = {"dp_size": 2, "pp_size": 1, "vpp_size": 1, "cp_size": 1}
    plain, drawn = LogProbRequest.of(range(8)), LogProbRequest.of(range(8), draws=2)
    assert ranks.fits([plain, plain])
    assert ranks.fits([drawn, drawn])
    assert not ranks.fits([plain, drawn])
    assert not ranks.fits([plain] * 3)


def test_a_checkpoint_is_known_by_its_files(tmp_path: Path) -> None:
    from slime.arguments import parse_args
    from tools.tiny_model import make_tiny_checkpoint

    checkpoint = make_tiny_checkpoint(tmp_path / "model")
    args = parse_args(["--hf-checkpoint", str(checkpoint), *megatron_flags(checkpoint)], log_probs=True)
    content = log_prob_server.checkpoint_content(args, str(checkpoint))
    assert content == log_prob_server.checkpoint_content(args, str(checkpoint))
    with (checkpoint / "model.safetensors").open("ab") as file:
        file.write(b" ")
    assert content != log_prob_server.checkpoint_content(args, str(checkpoint))


def test_variables_stand_in_for_flags() -> None:
    environ = {"TEACHER_PORT": "8001", "MEGATRON_SERVER_WARMUP": "off", "MEGATRON_SERVER_MAX_LENGTH": ""}
    assert words_of_variables([], environ) == ["--teacher-port", "8001", "--no-megatron-server-warmup"]
    assert words_of_variables(["--teacher-port=1", "--megatron-server-warmup"], environ) == []
    assert words_of_variables([], {"MEGATRON_SERVER_WARMUP": "Yes"}) == ["--megatron-server-warmup"]
    with pytest.raises(ArgumentError, match=r"TEACHER_PORT gives --teacher-port: expected an integer, got 'tcp://"):
        words_of_variables([], {"TEACHER_PORT": "tcp://10.0.0.1:80"})


def test_flags_of_a_run_are_taken_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those about training, prompts and engines have no effect."""
    checkpoint = make_tiny_checkpoint(tmp_path / "model")
    words = f"""--hf-checkpoint {checkpoint} --prompt-data prompts.jsonl --advantage-estimator ppo --num-rollout 100
        --rollout-batch-size 3 --n-samples-per-prompt 5 --global-batch-size 15 --save {tmp_path}/save --save-interval 1
        --colocate --use-kl-loss --kl-coef 0.1 --actor-num-gpus-per-node 4 --tensor-model-parallel-size 2
        --teacher-port 8001"""
    args = parse_args(words.split(), log_probs=True)
    assert (args.num_rollout, args.use_critic, args.debug_train_only, args.colocate) == (0, False, True, False)
    assert (args.save, args.prompt_data, args.kl_coef, args.use_kl_loss) == (None, None, 0, False)
    assert (args.teacher_port, args.teacher_warmup_port) == (8001, 8001)
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(("dp", "vpp", "group", "micro"), [(1, 1, 1, 1), (3, 1, 1, 2), (2, 2, 2, 1)])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_every_rank_has_as_many_micro_batches(
    dp: int, vpp: int, group: int, micro: int, dynamic: bool, count: int
) -> None:
    args = Namespace(use_dynamic_batch_size=dynamic, max_tokens_per_gpu=16, micro_batch_size=micro)
    config = {"dp_size": dp, "cp_size": 1, "vpp_size": vpp, "microbatch_group_size_per_vp_stage": group}
    requests = [LogProbRequest.of(range(2 + 3 * i)) for i in range(count)]
    shards, positions = shards_of_requests(args, config, requests)
    assert len({len(shard.micro_batch_indices) for shard in shards}) == 1
    assert len(shards[0].micro_batch_indices) % (group if vpp > 1 else 1) == 0
    seen = {}
    for shard, places in zip(shards, positions, strict=True):
        assert sorted(i for indices in shard.micro_batch_indices for i in indices) == list(range(len(places)))
        seen |= zip(places, shard.requests, strict=True)
    assert all(seen[i] is request for i, request in enumerate(requests))
    assert all(len(seen[i].tokens) == 2 for i in range(count, len(seen)))

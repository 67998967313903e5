"""Calls of ``slime.utils``: HTTP, asyncio, small helpers, masks, processors, data, evaluation sets, schedules."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import socket
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.utils.data import Dataset
from slime.utils.eval_config import EvalDatasetConfig
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample
from tests.support.arguments import run_args
from tests.support.http_stub import http_stub
from tests.support.reference_calls import Call
from tests.support.rollout_args import CharTokenizer

HTTP, MISC, MASK = "slime.utils.http_utils.", "slime.utils.misc.", "slime.utils.mask_utils."
PROCESSING, DATA, EVAL = "slime.utils.processing_utils.", "slime.utils.data.", "slime.utils.eval_config."
BALANCE = "slime.utils.seqlen_balancing."
CLIENT = run_args(rollout_num_engines=1, rollout_num_gpus=8, rollout_num_gpus_per_engine=2, sglang_server_concurrency=4)


def served(**given: Any) -> Any:
    """An object whose ``post`` and ``get`` go to a server of their own that tells what it was asked."""

    class Served:
        def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
            from slime.utils import http_utils

            async def request() -> Any:
                http_utils.init_http_client(CLIENT)
                with http_stub(lambda seen: (200, [seen.method, seen.body])) as stub:
                    words = [stub.url if word == "URL" else word for word in args]
                    named = {key: stub.url if word == "URL" else word for key, word in kwargs.items()}
                    return await getattr(http_utils, name)(*words, **named)

            return asyncio.run(request())

        def post(self, *args: Any, **kwargs: Any) -> Any:
            return self.call("post", *args, **kwargs)

        def get(self, *args: Any, **kwargs: Any) -> Any:
            return self.call("get", *args, **kwargs)

    return Served()


async def four() -> int:
    return 4


def sleeper() -> dict[str, Any]:
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
    process.start()
    return {"process": process, "timeout": 10.0}


def taken_port() -> int:
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    held.listen()
    HELD.append(held)
    port: int = held.getsockname()[1]
    return port


HELD: list[socket.socket] = []


class One(metaclass=SingletonMeta):
    """A class with one instance."""


class Other(metaclass=SingletonMeta):
    """Another."""


BEFORE: list[Any] = []


def with_instances(**given: Any) -> dict[str, Any]:
    BEFORE[:] = [One(), Other()]
    return given


def forgotten(*, other: bool) -> Any:
    def check(_: Any) -> None:
        assert One() is not BEFORE[0]
        assert (Other() is not BEFORE[1]) is other

    return check


def free_ports(port: Any) -> None:
    assert 1024 <= port < 65536


def address(found: Any) -> None:
    socket.getaddrinfo(found, None)


HTTP_CALLS = [
    Call(HTTP + "post", {"url": "URL", "payload": {"a": 1}}, ["POST", {"a": 1}], on=served),
    Call(
        HTTP + "post",
        {"url": "URL", "payload": {}, "max_retries": 1, "headers": {"X-SMG-Routing-Key": "k"}},
        ["POST", {}],
        on=served,
    ),
    Call(HTTP + "get", {"url": "URL"}, ["GET", None], on=served),
    Call(HTTP + "init_http_client", {"args": CLIENT}, None),
    Call(HTTP + "get_rollout_num_engines", {"args": CLIENT}, 1),
    Call(
        HTTP + "get_rollout_num_engines",
        {"args": run_args(rollout_num_engines=None, rollout_num_gpus=8, rollout_num_gpus_per_engine=3)},
        2,
    ),
    Call(HTTP + "get_host_info", {}, lambda found: address(found[1])),
    Call(HTTP + "find_available_port", {"base_port": 21000}, lambda port: port >= 21000 or pytest.fail(str(port))),
    Call(HTTP + "is_port_available", lambda: {"port": taken_port()}, False),
    Call(HTTP + "terminate_process", sleeper, lambda _, __, given: given["process"].exitcode is not None or 1 / 0),
    Call(HTTP + "_wrap_ipv6", {"host": "::1"}, "[::1]"),
    Call(HTTP + "_wrap_ipv6", {"host": "10.0.0.1"}, "10.0.0.1"),
    Call("slime.utils.async_utils.run", lambda: {"coro": four()}, 4),
    Call("slime.utils.async_utils.get_async_loop", {}, lambda loop: loop.is_running() or pytest.fail("stopped")),
]

PARAMETERS = [(name, torch.zeros(size, dtype=torch.uint8)) for name, size in (("a", 3), ("b", 2), ("c", 9), ("d", 1))]
MISC_CALLS = [
    Call(MISC + "load_function", {"path": "math.sqrt"}, lambda found: found(9) == 3 or pytest.fail(str(found))),
    Call(MISC + "SingletonMeta.clear_instances", with_instances, forgotten(other=True)),
    Call(MISC + "SingletonMeta.clear_instances", lambda: with_instances(cls=One), forgotten(other=False)),
    Call(MISC + "Box", {"inner": 4}, lambda box: box.inner == 4 or pytest.fail(str(box))),
    Call(MISC + "group_by", {"iterable": "abca"}, {"a": ["a", "a"], "b": ["b"], "c": ["c"]}),
    Call(MISC + "group_by", {"iterable": [1, 2, 3], "key": lambda n: n % 2}, {1: [1, 3], 0: [2]}),
    Call(MISC + "exec_command", {"cmd": "true"}, None),
    Call(MISC + "exec_command", {"cmd": "echo $((1 + 1))", "capture_output": True}, "2\n"),
    Call(MISC + "get_free_port", {"start_port": 21000, "consecutive": 2}, free_ports),
    Call(MISC + "get_current_node_ip", {}, address),
    *(  # after every second rollout, at the end of every third, and after the last, of five
        Call(
            MISC + "should_run_periodic_action",
            {"rollout_id": rollout, "interval": 2, "num_rollout_per_epoch": 3, "num_rollout": 5},
            rollout in (1, 2, 3, 4),
        )
        for rollout in range(5)
    ),
    Call(MISC + "should_run_periodic_action", {"rollout_id": 4, "interval": 2}, False),
    Call(MISC + "should_run_periodic_action", {"rollout_id": 4, "interval": None}, False),
    *(
        Call(MISC + "decode_int32_meta_array", {"value": value}, lambda found: found.tolist() == [1, -1] or 1 / 0)
        for value in ([1, -1], b"\x01\x00\x00\x00\xff\xff\xff\xff", "AQAAAP////8=", torch.tensor([1, -1]))
    ),
    Call(
        MISC + "chunk_named_params_by_size",
        {"named_params": PARAMETERS, "chunk_size": 5},
        lambda chunks: (
            [[n for n, _ in chunk] for chunk in chunks] == [["a", "b"], ["c"], ["d"]] or pytest.fail("other")
        ),
    ),
]

MESSAGES = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
TRAINED = "2<|im_end|>\n"
_TOKENIZER: list[Any] = []


def tiny_tokenizer() -> Any:
    if not _TOKENIZER:
        from transformers import AutoTokenizer

        from tools.tiny_model import make_tokenizer

        path = Path(tempfile.mkdtemp())
        make_tokenizer(path)
        _TOKENIZER.append(AutoTokenizer.from_pretrained(path))
    return _TOKENIZER[0]


def generator(kind: str = "qwen") -> MultiTurnLossMaskGenerator:
    return MultiTurnLossMaskGenerator(tiny_tokenizer(), kind)


def trains_the_answer(result: Any) -> None:
    ids, mask = result
    assert len(ids) == len(mask)
    trained = tiny_tokenizer().decode([token for token, on in zip(ids, mask, strict=True) if on])
    assert trained in (TRAINED, TRAINED.rstrip("\n"))


GENERATOR = MASK + "MultiTurnLossMaskGenerator"
MASK_CALLS = [
    Call(
        GENERATOR,
        lambda: {"tokenizer": tiny_tokenizer(), "tokenizer_type": "qwen"},
        lambda made: trains_the_answer(made.get_loss_mask(MESSAGES)),
    ),
    *(
        Call(
            f"{GENERATOR}.{method}",
            {"messages": MESSAGES, **tools},
            trains_the_answer,
            on=lambda kind=kind: generator(kind),
        )
        for method, kind in [
            ("get_loss_mask", "qwen"),
            ("gen_multi_turn_loss_mask_qwen", "qwen"),
            ("gen_multi_turn_loss_mask_qwen3", "qwen3"),
            ("gen_multi_turn_loss_mask_qwen3_5", "qwen3_5"),
        ]
        for tools in ({}, {"tools": None})
    ),
    *(
        Call(path, {"loss_masks": [[0, 0, 1, 0, 1], [0, 1], [0]]}, [3, 1, 0], on=on)
        for path, on in ((GENERATOR + ".get_response_lengths", generator), (MASK + "get_response_lengths", None))
    ),
    Call(
        GENERATOR + ".get_text_from_loss_mask",
        lambda: {"token_ids": tiny_tokenizer().encode("abcd"), "loss_masks": [0, 1, 0, 1]},
        ["b", "d"],
        on=generator,
    ),
]


class Picture:
    """The part of an image that the processor helpers need."""


IMAGE_CALLS = [
    Call(PROCESSING + "build_processor_kwargs", {}, lambda found: isinstance(found, dict) or 1 / 0),
    Call(
        PROCESSING + "build_processor_kwargs",
        {"multimodal_inputs": {"images": ["i"]}},
        lambda found: found["images"] == ["i"] or pytest.fail(str(found)),
    ),
]


def rows(*records: dict[str, Any]) -> str:
    path = Path(tempfile.mkdtemp()) / "rows.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


QUESTIONS = [{"q": "long question", "a": "1", "m": {"k": 1}}, {"q": "ab", "a": "2", "m": {}}]


def dataset(**more: Any) -> dict[str, Any]:
    return {"path": rows(*QUESTIONS), "tokenizer": CharTokenizer(), "processor": None, "max_length": 5, **more}


def short_questions(data: Any) -> None:
    assert [(s.prompt, s.label) for s in data.samples] == [("ab", "2")]


def two_prompts() -> Dataset:
    return Dataset(rows(*QUESTIONS), CharTokenizer(), None, None, prompt_key="q")


DATA_CALLS = [
    Call(
        DATA + "Dataset",
        lambda: dataset(
            prompt_key="q",
            multimodal_keys=None,
            label_key="a",
            tool_key=None,
            metadata_key="m",
            seed=42,
            apply_chat_template=False,
            apply_chat_template_kwargs=None,
        ),
        short_questions,
    ),
    Call(
        DATA + "Dataset.shuffle",
        {"new_epoch_id": 3},
        lambda _, d: sorted(s.prompt for s in d.samples) == ["ab", "long question"] or 1 / 0,
        on=two_prompts,
    ),
    Call(DATA + "Dataset.__getitem__", {"index": 1}, lambda s: s.prompt == "ab" or pytest.fail(str(s)), on=two_prompts),
    Call(DATA + "Dataset.__len__", {}, 2, on=two_prompts),
    Call(DATA + "read_file", lambda: {"path": rows(*QUESTIONS)}, lambda found: list(found) == QUESTIONS or 1 / 0),
    Call(
        DATA + "filter_long_prompt",
        {
            "origin_samples": [Sample(prompt="abc"), Sample(prompt="abcd")],
            "tokenizer": CharTokenizer(),
            "processor": None,
            "max_length": 3,
        },
        lambda found: [s.prompt for s in found] == ["abc"] or pytest.fail(str(found)),
    ),
    Call(DATA + "get_source", {"sample": Sample(metadata={"source_name": "mine"})}, "mine"),
    Call(DATA + "get_source", {"sample": Sample()}, "unknown"),
]

EVAL_CALLS = [
    Call(EVAL + "EvalDatasetConfig", {"name": "n", "path": "p"}, lambda c: (c.name, c.path) == ("n", "p") or 1 / 0),
    Call(
        EVAL + "EvalDatasetConfig.inject_metadata",
        {"sample_metadata": {"a": 1}},
        {"a": 1, "rm_type": "math", "b": 2},
        on=lambda: EvalDatasetConfig(name="n", path="p", rm_type="math", metadata_overrides={"b": 2}),
    ),
    Call(EVAL + "ensure_dataset_list", {"config": {"n": {"path": "p"}}}, [{"name": "n", "path": "p"}]),
    Call(EVAL + "ensure_dataset_list", {"config": None}, []),
]

STATIC = SimpleNamespace(use_dynamic_batch_size=False, micro_batch_size=1, balance_data=False, balance_by_flops=False)
ONE_STAGE = {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}


def evenly(partitions: Any) -> None:
    """5 + 1 and 4 + 2 are the two halves of equal size that come nearest."""
    assert sorted(sorted(part) for part in partitions) == [[0, 3], [1, 2]]


SCHEDULE_CALLS = [
    Call(  # rollouts 0 and 1 make a step, 2 is left over; ranks take micro-batches in turn
        "slime.utils.dp_schedule.build_dp_schedule",
        {
            "args": STATIC,
            "train_parallel_config": ONE_STAGE,
            "total_lengths": [3, 3, 3, 3, 3],
            "global_batch_size": 2,
            "rollout_indices": [0, 0, 1, 1, 2],
        },
        lambda found: tuple(found) == ([[0, 2], [1, 3]], [[[0], [1]], [[0], [1]]], [2], [2]) or pytest.fail(str(found)),
    ),
    *(
        Call(BALANCE + name, {"seqlen_list": [5, 4, 2, 1], "k_partitions": 2, "equal_size": True}, evenly)
        for name in ("get_seqlen_balanced_partitions", "karmarkar_karp")
    ),
    Call(BALANCE + "first_fit_pack", {"sizes": [3, 4, 2, 9], "capacity": 5}, [[0, 2], [1], [3]]),
    Call(
        BALANCE + "expand_bins_by_splitting",
        {"bins": [[0, 1], [2]], "sizes": [3, 4, 2], "target": 3},
        lambda bins: sorted(sorted(b) for b in bins) == [[0], [1], [2]] or pytest.fail(str(bins)),
    ),
    Call(BALANCE + "get_reverse_idx", {"idx_map": [2, 0, 1]}, [1, 2, 0]),
    Call(
        "slime.ray.rollout_validation.validate_server_group_gpu_indices",
        {
            "worker_type": "regular",
            "gpu_offset": 4,
            "num_gpus_per_engine": 2,
            "num_gpus_per_engine_on_node": 2,
            "num_engines": 2,
            "num_available_gpus": 8,
            "rollout_num_gpus": 8,
            "rollout_num_gpus_per_engine": 2,
        },
        None,
    ),
]
CALLS = [*HTTP_CALLS, *MISC_CALLS, *MASK_CALLS, *IMAGE_CALLS, *DATA_CALLS, *EVAL_CALLS, *SCHEDULE_CALLS]

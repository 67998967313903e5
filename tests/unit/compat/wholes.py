"""Calls that need files, a server or a manager: other rollout functions, rewards over HTTP, the rollout manager."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.rollout import sft_rollout
from slime.rollout.debug_data import load_rollout
from slime.utils.types import Sample
from tests.support.arguments import run_args
from tests.support.http_stub import http_stub
from tests.support.reference_calls import Call, check_equal
from tests.support.rollout_manager import manager_maker
from tests.unit.compat.helpers import generator, tiny_tokenizer, trains_the_answer

GENERATOR = "slime.utils.mask_utils.MultiTurnLossMaskGenerator."
PROCESSING, MANAGER = "slime.utils.processing_utils.", "slime.ray.rollout.RolloutManager."
TALK = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]


class Talks:
    """A data source of conversations."""

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        return [[Sample(index=i, group_index=i, prompt=TALK)] for i in range(num_samples)]


PATCHES: list[pytest.MonkeyPatch] = []


def patched() -> pytest.MonkeyPatch:
    """Patches of a call, which the test undoes after it."""
    PATCHES.append(pytest.MonkeyPatch())
    return PATCHES[-1]


def conversations() -> dict[str, Any]:
    patched().setattr(sft_rollout, "mask_generator", lambda *args: generator())
    args = SimpleNamespace(
        n_samples_per_prompt=1,
        rollout_batch_size=2,
        hf_checkpoint="tiny",
        loss_mask_type="qwen",
        trust_remote_code=False,
    )
    return {"args": args, "rollout_id": 0, "data_source": Talks(), "evaluation": False}


class SleptError(Exception):
    """In the place of an hour."""


class Sleeper:
    """``sleep`` that does not return, until the first hour is over."""

    def sleep(self, *args: Any, **kwargs: Any) -> str:
        from slime.rollout import sleep_rollout

        def end(seconds: float) -> None:
            raise SleptError

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sleep_rollout, "time", SimpleNamespace(sleep=end, monotonic=time.monotonic))
            with pytest.raises(SleptError):
                sleep_rollout.sleep(*args, **kwargs)
        return "slept"


def dumped() -> dict[str, Any]:
    path = Path(tempfile.mkdtemp()) / "dump_0.pt"
    samples = [Sample(index=i, group_index=i // 2).to_dict() for i in range(4)]
    torch.save({"rollout_id": 0, "samples": samples}, path)
    assert len(load_rollout(path)) == 4
    args = run_args(load_forge_rollout_data=str(path.parent / "dump_{rollout_id}.pt"))
    return {"args": args, "rollout_id": 5, "data_source": None, "evaluation": False}


def teacher_reply() -> dict[str, Any]:
    """The teacher's log-probs of [7, 8, 9]; nothing is known about the first, and the response is the last two."""
    reply = {"meta_info": {"input_token_logprobs": [[None, 7, None], [-1.0, 8, None], [-2.0, 9, None]]}}
    sample = Sample(tokens=[7, 8, 9], response_length=2, reward=reply)
    return {"args": SimpleNamespace(reward_key=None), "samples": [sample]}


def distilled(result: Any, _: Any, given: dict[str, Any]) -> None:
    check_equal(result, ([0.0], [0.0]))
    check_equal(list(given["samples"][0].teacher_log_probs), [-1.0, -2.0])


class Remote:
    """``remote_rm`` against a server that echoes what it was asked."""

    async def remote_rm(self, *args: Any, **kwargs: Any) -> Any:
        from slime.rollout.rm_hub import remote_rm

        with http_stub(lambda seen: (200, seen.body)) as stub:
            (args[0] if args else kwargs["args"]).rm_url = stub.url
            return await remote_rm(*args, **kwargs)


def asked() -> dict[str, Any]:
    args = SimpleNamespace(rm_url=None, rollout_request_timeout=30.0)
    return {"args": args, "sample": Sample(prompt="p", response="r", label="l")}


def aligned() -> dict[str, Any]:
    ids, _ = generator().get_loss_mask(TALK)
    return {"messages": TALK, "input_ids": [*ids[:2], 0, 0, *ids[2:]], "tools": None}


def distilled_answer(result: Any) -> None:
    assert generator("distill_qwen").get_text_from_loss_mask(*result) == ["2"]


def picture() -> Any:
    from PIL import Image

    return Image.new("RGB", (2, 2))


def tokenizer_path() -> str:
    path = tempfile.mkdtemp()
    tiny_tokenizer().save_pretrained(path)
    return path


class Taker:
    """``process_rollout_data`` with an object store that gives back what is asked of it."""

    def process_rollout_data(self, *args: Any, **kwargs: Any) -> Any:
        import ray

        from slime.utils.data import process_rollout_data

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ray, "get", lambda ref: ref)
            return process_rollout_data(*args, **kwargs)


def shards() -> list[Any]:
    return [SimpleNamespace(inner=SimpleNamespace(to_rollout_data=lambda rank=rank: {"rank": rank})) for rank in (0, 1)]


def manager(**changes: Any) -> Any:
    return manager_maker(Path(tempfile.mkdtemp()), patched())(**changes)


def two_ranks(boxes: Any) -> None:
    """Two rollouts of two samples make a step of four; the third waits for the next."""
    rows = [box.inner.to_rollout_data()["sample_indices"] for box in boxes]
    assert [len(row) for row in rows] == [STEP_SAMPLES // 2] * 2
    assert sorted(rows[0] + rows[1]) == list(range(STEP_SAMPLES))


STEP_SAMPLES = 4


def state_is_written(_: Any, made: Any) -> None:
    assert list(Path(made.args.save).iterdir())


def generated_manager() -> Any:
    made = manager(rollout_batch_size=4)
    made.generate(0)
    return made


class Router:
    """``run_router`` with a router that ends at once."""

    def run_router(self, *args: Any, **kwargs: Any) -> list[Any]:
        from sglang_router import launch_router

        from slime.utils.http_utils import run_router

        served: list[Any] = []
        patched().setattr(launch_router, "launch_router", lambda args: served.append(args) or served)
        assert run_router(*args, **kwargs) is None
        return served


def VisionModel() -> Any:
    """The vision model's provider, without Megatron: what is built is said in words."""

    def get_qwen3_5_vl_model_provider(*args: Any, **kwargs: Any) -> Any:
        from slime_plugins.models.qwen3_5_vl import get_qwen3_5_vl_model_provider as provide

        def build(args: Any, config: Any, spec: Any, tower: Any, **stage: Any) -> str:
            whole = stage["pre_process"] and stage["post_process"] and stage["vp_stage"] is None
            return f"{tower.__name__} and {spec.__name__}, {'whole' if whole else 'in parts'}"

        builder = SimpleNamespace(vision_language_model=build)
        patched().setitem(sys.modules, "slime.backends.megatron_utils.model.vision", builder)
        return provide(*args, **kwargs)

    return SimpleNamespace(get_qwen3_5_vl_model_provider=get_qwen3_5_vl_model_provider)


ONE_STAGE = {"dp_size": 1, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}

CALLS = [
    Call("slime.utils.http_utils.run_router", {"args": "router args"}, ["router args"], on=Router),
    Call(
        "slime_plugins.models.qwen3_5_vl.get_qwen3_5_vl_model_provider",
        {"args": SimpleNamespace(hf_checkpoint="/model"), "config": None, "vp_stage": None},
        "Qwen3_5VisionModel and get_qwen3_5_spec, whole",
        on=VisionModel,
    ),
    Call(
        "slime.rollout.sft_rollout.generate_rollout",
        conversations,
        lambda output: [trains(group[0]) for group in output.samples] == [None, None] or pytest.fail(str(output)),
    ),
    Call(
        "slime.rollout.sleep_rollout.sleep",
        {"args": None, "rollout_id": 0, "data_source": None, "evaluation": False},
        "slept",
        on=Sleeper,
        also={"data_source": "data_buffer"},
    ),
    Call(
        "slime.rollout.forge_load.generate_rollout",
        dumped,
        lambda output: [[s.index for s in group] for group in output.samples] == [[0, 1], [2, 3]] or 1 / 0,
        also={"data_source": "data_buffer"},
    ),
    Call("slime.rollout.on_policy_distillation.post_process_rewards", teacher_reply, distilled),
    Call("slime.rollout.rm_hub.remote_rm", asked, {"prompt": "p", "response": "r", "label": "l"}, on=Remote),
    Call(
        f"{GENERATOR}gen_multi_turn_loss_mask_distill_qwen",
        {"messages": TALK, "tools": None},
        distilled_answer,
        on=lambda: generator("distill_qwen"),
    ),
    Call(f"{GENERATOR}get_loss_mask_with_multimodal_alignment", aligned, trains_the_answer, on=generator),
    Call(
        PROCESSING + "load_tokenizer",
        lambda: {"name_or_path": tokenizer_path(), "trust_remote_code": False},
        lambda loaded: loaded.encode("ab") == tiny_tokenizer().encode("ab") or pytest.fail("another tokenizer"),
    ),
    Call(
        PROCESSING + "load_processor",
        lambda: {"name_or_path": tokenizer_path(), "trust_remote_code": False},
        None,  # a model of text alone has none
    ),
    Call(
        PROCESSING + "encode_image_for_rollout_engine",
        lambda: {"image": picture()},
        lambda text: text.startswith("data:image/png;base64,iVBOR") or pytest.fail(text[:40]),
    ),
    Call(
        "slime.utils.data.process_rollout_data",
        {"args": None, "rollout_data_ref": shards(), "dp_rank": 1, "dp_size": 2},
        {"rank": 1},
        on=Taker,
    ),
    Call(
        "slime.utils.accelerator.set_accelerator",
        {"accelerator": "cpu"},
        lambda found: found.device_type == "cpu" or pytest.fail(found.device_type),
    ),
    Call(MANAGER + "generate", {"rollout_id": 0}, two_ranks, on=manager),
    Call(MANAGER + "eval", {"rollout_id": 0}, [], on=manager),
    Call(MANAGER + "save", {"rollout_id": 0}, state_is_written, on=generated_manager),
    Call(MANAGER + "load", {"rollout_id": 0}, None, on=manager),
    Call(MANAGER + "get_num_rollout_per_epoch", {}, 10 // 3, on=manager),
    Call(MANAGER + "set_train_parallel_config", {"config": ONE_STAGE}, None, on=manager),
    Call(MANAGER + "health_monitoring_pause", {}, None, on=manager),
    Call(MANAGER + "health_monitoring_resume", {}, None, on=manager),
]


def trains(sample: Sample) -> None:
    """The tokens after the first trained one are the response, and its mask is as long."""
    assert sample.reward == 0
    assert len(sample.loss_mask or []) == sample.response_length
    trains_the_answer((sample.tokens[-sample.response_length :], sample.loss_mask))

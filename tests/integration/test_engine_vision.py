"""Engines without a GPU that see: log-probs are those of transformers with the same pictures, also after a push."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from slime.backends.sglang_utils.engine import EngineProcess
from slime.backends.sglang_utils.environment import engine_environment
from slime.backends.sglang_utils.router import RouterProcess
from slime.servers.engine_client import EngineClient
from slime.utils.image_tokens import joined, without_placeholders
from slime.utils.processing_utils import encode_image_for_rollout_engine, load_processor
from tests.integration.test_engine_families import with_exact_rule
from tests.support.engines import engine_args, output_log_probs
from tests.support.vision_models import FAMILIES, VisionReference, drawing, make_vision_checkpoint
from tools.tiny_model import END, IMAGE, START

pytestmark = pytest.mark.integration

TOLERANCE = 1e-5
SHOWN = START + IMAGE + END
CASES: dict[str, tuple[str, list[Image.Image]]] = {
    "text": ("no picture here", []),
    "one": (f"look: {SHOWN} what?", [drawing(1)]),
    "two sizes": (f"{SHOWN} and {SHOWN}, well", [drawing(2, 200, 130), drawing(3, 64, 64)]),
}
PIXELS_OF_ENGINES = """
import hashlib, sys
from slime_engine_plugin import register
register()
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.utils.common import load_image
from sglang.srt.utils.hf_transformers_utils import get_processor
processor = get_processor(sys.argv[1], image_processor_backend="pil")
image, _ = load_image(sys.stdin.read(), False)
out = processor(text=["<|vision_start|><|image_pad|><|vision_end|>"], images=[image], padding=True, return_tensors="pt")
print(hashlib.sha256(out["pixel_values"].numpy().tobytes()).hexdigest(), out["image_grid_thw"].tolist())
"""


def processed(processor: Any, text: str, images: list[Image.Image]) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Return the expanded ids and the tensors of the images."""
    made = processor(text=text, images=images or None, images_kwargs={"return_tensors": "pt"})
    return list(made["input_ids"][0]), {k: made[k] for k in ("pixel_values", "image_grid_thw") if k in made}


def generate(
    client: EngineClient,
    given: dict[str, Any],
    images: list[Image.Image],
    forbidden: list[int],
    temperature: float = 1.0,
) -> dict[str, Any]:
    if images:
        given = {**given, "image_data": [encode_image_for_rollout_engine(image) for image in images]}
    params = {"max_new_tokens": 12, "temperature": temperature, "ignore_eos": True}
    payload = {**given, "sampling_params": params, "return_logprob": True}
    return dict(client.generate(without_placeholders(payload, forbidden)))


def difference(reference: VisionReference, prompt: list[int], reply: dict[str, Any], tensors: dict[str, Any]) -> float:
    expected = reference.log_probs(prompt, reply["output_ids"], tensors)
    return (output_log_probs(reply) - expected).abs().max().item()


def compare(client: EngineClient, checkpoint: Path, family: str) -> None:
    """Compare replies with transformers: greedy by text, sampled by ids with one token an image, and a second turn."""
    processor = load_processor(str(checkpoint))
    reference = VisionReference(checkpoint, with_exact_rule if family == "qwen3_5" else None)
    for name, (text, images) in CASES.items():
        expanded, tensors = processed(processor, text, images)
        ids = processor.tokenizer(text)["input_ids"]
        for given, temperature in (({"text": text}, 0.0), ({"input_ids": ids}, 1.0)):
            reply = generate(client, given, images, reference.forbidden, temperature)
            assert reply["meta_info"]["prompt_tokens"] == len(expanded)
            found = difference(reference, expanded, reply, tensors)
            assert found <= TOLERANCE, f"{checkpoint.name}, {name}, {list(given)}: {found:.1e}"
            assert temperature or reference.are_best(expanded, reply["output_ids"], tensors)
        # the next turn finds the first one in the engine's cache, and shows another picture
        image, more = drawing(4, 80, 120), f"more: {SHOWN}"
        later, shown = processed(processor, more, [image])
        whole = [*expanded, *reply["output_ids"], *later]
        turn = [*ids, *reply["output_ids"], *processor.tokenizer(more)["input_ids"]]
        reply = generate(client, {"input_ids": turn}, [*images, image], reference.forbidden)
        assert reply["meta_info"]["prompt_tokens"] == len(whole)
        found = difference(reference, whole, reply, joined(tensors, shown))
        assert found <= TOLERANCE, f"{checkpoint.name}, {name}, second turn: {found:.1e}"


def two_checkpoints(root: Path, family: str) -> list[Path]:
    """Return checkpoints that differ in the tower too."""
    return [make_vision_checkpoint(root / str(seed), family, seed=seed) for seed in (11, 12)]


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        *((family, 1) for family in FAMILIES),
        *(pytest.param(family, 2, marks=pytest.mark.soak) for family in ("qwen3_vl", "qwen3_vl_moe")),
    ],
)
def test_replies_are_those_of_transformers(family: str, ranks: int, tmp_path: Path) -> None:
    """Also after a push, and from engines of two tensor-parallel ranks."""
    old, new = two_checkpoints(tmp_path, family)
    args = engine_args(old, sglang_chunked_prefill_size=16)
    engine = EngineProcess(args, rank=0, host="127.0.0.1", log_path=tmp_path / "engine.log", num_gpus=ranks)
    engine.start()
    try:
        engine.wait_ready()
        client = engine.client(timeout=120)
        compare(client, old, family)
        client.update_weights_from_disk(new, weight_version="new")
        compare(client, new, family)
    finally:
        engine.stop()


@pytest.mark.soak
def test_prefill_and_decode_engines(tmp_path: Path) -> None:
    """On every change: caches of text between such engines, in test_loop_disaggregated.py."""
    old, new = two_checkpoints(tmp_path, "qwen3_vl")
    args = engine_args(old, sglang_chunked_prefill_size=16)
    router = RouterProcess(args, "127.0.0.1", log_path=tmp_path / "router.log", pd_disaggregation=True)
    engines = [
        EngineProcess(args, rank=rank, host="127.0.0.1", log_path=tmp_path / f"{kind}.log", worker_type=kind)
        for rank, kind in enumerate(("prefill", "decode"))
    ]
    try:
        for process in (router, *engines):
            process.start()
        for process in (router, *engines):
            process.wait_ready()
        for engine in engines:
            router.add_engine(engine.info)
        client = EngineClient(router.url, timeout=400)
        compare(client, old, "qwen3_vl")
        for engine in engines:
            engine.client(120).update_weights_from_disk(new, weight_version="new")
        compare(client, new, "qwen3_vl")
    finally:
        router.stop()
        for engine in engines:
            engine.stop()


def test_driver_and_engine_make_the_same_pixels(tmp_path: Path) -> None:
    checkpoint = make_vision_checkpoint(tmp_path, "qwen3_vl")
    image = drawing(5, 333, 71)  # is resized
    done = subprocess.run(
        [sys.executable, "-c", PIXELS_OF_ENGINES, str(checkpoint)], input=encode_image_for_rollout_engine(image),
        env=engine_environment(device_type="cpu"), capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    _, tensors = processed(load_processor(str(checkpoint)), SHOWN, [image])
    digest = hashlib.sha256(tensors["pixel_values"].numpy().tobytes()).hexdigest()
    assert done.stdout.split(maxsplit=1) == [digest, f"{tensors['image_grid_thw'].tolist()}\n"]

"""An engine whose images another server encodes, against one that does it itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.sglang_utils.engine import EngineProcess
from slime.utils.processing_utils import encode_image_for_rollout_engine
from tests.support.engines import engine_args, output_log_probs
from tests.support.plain_engine import PlainEngine
from tests.support.vision_models import drawing, make_vision_checkpoint
from tools.tiny_model import END, IMAGE, START

pytestmark = [pytest.mark.integration, pytest.mark.soak]
SHOWN = START + IMAGE + END
BACKEND = "zmq_to_scheduler"


def test_images_are_encoded_by_another_server(tmp_path: Path) -> None:
    checkpoint = make_vision_checkpoint(tmp_path / "model", "qwen3_vl")
    words = f"--encoder-only --encoder-transfer-backend {BACKEND} --image-processor-backend pil"
    encoder = PlainEngine(checkpoint, tmp_path / "encoder.log", "key", *words.split(), plugin=True)
    overrides = {
        "language_only": True, "encoder_urls": [f"http://{encoder.address}"], "encoder_transfer_backend": BACKEND,
    }  # fmt: skip
    args = engine_args(checkpoint)
    engines = [
        EngineProcess(
            args, rank=rank, host="127.0.0.1", log_path=tmp_path / f"{rank}.log", update_weights=False, overrides=own
        )
        for rank, own in enumerate((overrides, {}))
    ]  # fmt: skip
    try:
        encoder.start()
        for engine in engines:
            engine.start()
        encoder.wait_ready()
        for engine in engines:
            engine.wait_ready()
        for text, images in (
            (f"look: {SHOWN} what?", [drawing(1)]),
            (f"{SHOWN}{SHOWN}", [drawing(2), drawing(3, 64, 64)]),
        ):
            found, expected = (ask(engine, text, images) for engine in engines)
            assert found["output_ids"] == expected["output_ids"]
            assert (output_log_probs(found) - output_log_probs(expected)).abs().max() < 1e-5
            other = ask(engines[0], text, [drawing(9)] * len(images))
            assert not torch.equal(output_log_probs(other), output_log_probs(found))
    finally:
        encoder.kill()
        for engine in engines:
            engine.stop()
    assert (tmp_path / "encoder.log").read_text().count("POST /encode") >= 4


def ask(engine: EngineProcess, text: str, images: list[Any]) -> dict[str, Any]:
    body = {
        "text": text, "return_logprob": True,
        "image_data": [encode_image_for_rollout_engine(image) for image in images],
        "sampling_params": {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True},
    }  # fmt: skip
    return dict(engine.client(timeout=120).generate(body))

"""On which GPUs engines can be sent FP8 and INT4."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from slime.backends.megatron_utils import weights
from slime.weight_sync import create_updater, quantized
from slime.weights.quantization import Fp8, Int4
from tests.support.arguments import run_args

FORM = Fp8((128, 128), "block")


@pytest.fixture
def args(tmp_path: Path) -> Namespace:
    """A checkpoint with one FP8 weight."""
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": FORM.config([])}))
    parts = FORM.quantize(torch.ones(8, 8))
    save_file({f"model.q.weight{suffix}": part for suffix, part in parts.items()}, tmp_path / "model.safetensors")
    return run_args(hf_checkpoint=str(tmp_path))


@pytest.mark.parametrize(
    ("capability", "takes"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((10, 0), False)]
)
def test_gpus_whose_engines_repack_fp8_are_refused(
    args: Namespace, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], takes: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    if takes:
        quantizer = quantized.quantizer_of(args)
        assert quantizer is not None
        assert quantizer.format == FORM
    else:
        with pytest.raises(ValueError, match="cannot be sent new ones"):
            quantized.quantizer_of(args)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_int4_is_sent_to_all_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """The engines' rearrangement is undone for a push. Scales are the checkpoint's, in bf16."""
    form = Int4(8)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": form.config([])}))
    parts = form.quantize(torch.ones(8, 8, dtype=torch.bfloat16))
    save_file({f"model.q.weight{suffix}": part for suffix, part in parts.items()}, tmp_path / "model.safetensors")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    quantizer = quantized.quantizer_of(run_args(hf_checkpoint=str(tmp_path)))
    assert quantizer is not None
    sent = dict(quantizer.quantize("model.q.weight", torch.ones(8, 8)))
    assert sent["model.q.weight_scale"].dtype == torch.bfloat16


def test_stacked_experts_that_the_checkpoint_has_one_by_one_are_refused(
    args: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cast to FP8 without scales would be loaded without a word. Before anything is connected or sent."""
    trained = [("model.q.weight", (8, 8), torch.bfloat16), ("model.experts.gate_up_proj", (4, 8, 8), torch.bfloat16)]
    monkeypatch.setattr(weights, "describe_hf_weights", lambda model, args: trained)
    with pytest.raises(ValueError, match=r"has no model\.experts\.gate_up_proj \(4, 8, 8\)"):
        create_updater(args, SimpleNamespace(model=[], args=args), synchronous_loop=True)


def test_a_push_does_not_read_the_checkpoint_again(args: Namespace) -> None:
    first = quantized.quantizer_of(args)
    (Path(args.hf_checkpoint) / "config.json").unlink()
    assert quantized.quantizer_of(args) is first is not None

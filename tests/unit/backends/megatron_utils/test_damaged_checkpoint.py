"""A checkpoint whose files are damaged or cut off is named, with what can be done."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from slime.backends.megatron_utils import import_megatron
from slime.backends.megatron_utils.checkpoints.save_load import TrainerState, _naming_damage, load_checkpoint
from tests.support.arguments import run_args


@pytest.fixture
def root(tmp_path: Path) -> Path:
    directory = tmp_path / "iter_0000003"
    directory.mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    (directory / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (directory / ".metadata").write_bytes(b"")
    torch.save({"iteration": 3, "weights": list(range(1000))}, directory / "common.pt")
    return tmp_path


@pytest.mark.parametrize("size", [0, 1, 100, 2000])
def test_common_state_that_is_cut_off(size, root):
    import_megatron()
    path = root / "iter_0000003" / "common.pt"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match="cannot be read, a file of it is damaged or cut off") as caught:
        load_checkpoint(run_args(), root, TrainerState([]))
    message = str(caught.value)
    assert message.startswith(f"checkpoint {root / 'iter_0000003'} ")
    assert f"common.pt {size}" in message
    assert message.endswith("--ckpt-step")


def failing(cause: Exception) -> CheckpointException:
    return CheckpointException("load", {0: (cause, None)})


@pytest.mark.parametrize(
    "cause",
    [EOFError("Ran out of input"), RuntimeError("PytorchStreamReader failed reading zip archive"),
     pickle.UnpicklingError("pickle data was truncated"), OSError("read 3 of 5 bytes")],
)  # fmt: skip
def test_shards_that_are_cut_off(cause, root):
    for error in (cause, failing(cause)):
        with pytest.raises(ValueError, match=re.escape(str(cause))), _naming_damage(root / "iter_0000003"):
            raise error


def test_a_model_of_other_shapes_is_no_damage(root):
    error = failing(RuntimeError("Missing key in checkpoint state_dict: decoder.weight"))
    with pytest.raises(CheckpointException) as caught, _naming_damage(root / "iter_0000003"):
        raise error
    assert caught.value is error
    assert caught.value.__notes__ == [f"while reading the checkpoint {root / 'iter_0000003'}"]

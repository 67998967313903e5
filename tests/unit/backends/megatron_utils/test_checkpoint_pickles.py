"""Checkpoints that name functions to run are refused by every reader; plain ones are read as they were written."""

from __future__ import annotations

import io
import os
import pickle
import random
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from slime.backends.megatron_utils import import_megatron
from slime.backends.megatron_utils.checkpoints import formats as checkpoint_formats
from slime.backends.megatron_utils.checkpoints.directory import TORCH
from slime.backends.megatron_utils.checkpoints.pickles import UntrustedPickle, check_metadata, loads, plain_values_only
from slime.backends.megatron_utils.checkpoints.save_load import TrainerState, load_checkpoint
from slime.backends.megatron_utils.checkpoints.torch_dist import TorchDistCheckpoint
from tests.support.arguments import run_args


class Runs:
    """Writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "it-ran"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A ``torch_dist`` checkpoint, as far as its pickles are read."""
    directory = tmp_path / "save/iter_0000003"
    dcp.save({"decoder.weight": torch.ones(2, 2)}, checkpoint_id=directory, no_dist=True)
    (directory.parent / "latest_checkpointed_iteration.txt").write_text("3")
    (directory / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    torch.save({"iteration": 3}, directory / "common.pt")
    return directory.parent


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_a_resume_runs_nothing_of_a_checkpoint(root, mark, name):
    path = root / "iter_0000003" / name
    buffer = io.BytesIO()
    torch.save({"iteration": Runs(mark)}, buffer)
    path.write_bytes(pickle.dumps(Runs(mark)) if name == ".metadata" else buffer.getvalue())
    with pytest.raises(ValueError, match=r"would run code when it is read: it holds \S*mkdir\.") as caught:
        load_checkpoint(run_args(), root, TrainerState([]))
    assert str(root) in str(caught.value)
    assert "--unpickle-checkpoints" in str(caught.value)
    assert not mark.exists()


def test_the_converter_runs_nothing_of_a_checkpoint(root, mark):
    (root / "iter_0000003/.metadata").write_bytes(pickle.dumps(Runs(mark)))
    with pytest.raises(ValueError, match="would run code when it is read"):
        TorchDistCheckpoint(root)
    assert not mark.exists()


class Nested:
    """Unpickles to a call of ``torch.load`` on a nested file."""

    def __init__(self, value: Any) -> None:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        self.data = buffer.getvalue()

    def __reduce__(self) -> Any:
        return torch.storage._load_from_bytes, (self.data,)


@pytest.mark.parametrize("variable", [None, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"])
def test_a_file_within_the_metadata_runs_nothing(root, mark, monkeypatch, variable):
    if variable is not None:
        monkeypatch.setenv(variable, "1")
    (root / "iter_0000003/.metadata").write_bytes(pickle.dumps(Nested(Runs(mark))))
    with pytest.raises(UntrustedPickle, match=r"it holds \S*mkdir\."):
        check_metadata(root / "iter_0000003")
    with pytest.raises(UntrustedPickle):
        TorchDistCheckpoint(root)
    with pytest.raises(UntrustedPickle):
        loads(pickle.dumps(Nested(Runs(mark))))
    assert not mark.exists()
    assert loads(pickle.dumps(Nested({"a": 1}))) == {"a": 1}


def test_damage_within_a_storage_is_not_left_to_a_reader_that_runs_it(root):
    nested = Nested(torch.ones(2))
    nested.data = b"PK" + nested.data[-40:]
    (root / "iter_0000003/.metadata").write_bytes(pickle.dumps(nested))
    with pytest.raises(UntrustedPickle, match="_load_from_bytes"):
        check_metadata(root / "iter_0000003")


def test_values_between_tensors_run_nothing(root, mark):
    """torch reads them without ``weights_only``."""
    directory = root / "iter_0000004"
    dcp.save({"a": torch.ones(1), "b": [Runs(mark)]}, checkpoint_id=directory, no_dist=True)
    wanted = {"a": torch.zeros(1), "b": [None]}
    with pytest.raises(UntrustedPickle, match="--unpickle-checkpoints"), plain_values_only(directory):
        dcp.load(wanted, checkpoint_id=directory, no_dist=True)
    assert not mark.exists()
    with plain_values_only(directory, trusted=True):
        dcp.load(wanted, checkpoint_id=directory, no_dist=True)
    assert mark.exists()


def test_a_file_of_a_rank_runs_nothing(tmp_path, mark, monkeypatch):
    monkeypatch.setattr(checkpoint_formats, "_rank_name", lambda: "mp_rank_00")
    path = tmp_path / "mp_rank_00/model_optim_rng.pt"
    path.parent.mkdir()
    torch.save({"model": {"w": torch.ones(2)}, "args": Runs(mark)}, path)
    with pytest.raises(UntrustedPickle), plain_values_only(tmp_path):
        checkpoint_formats._stored(tmp_path, TORCH, lazily=True)
    with pytest.raises(pickle.UnpicklingError):
        checkpoint_formats.shapes_of(tmp_path, "w")
    assert not mark.exists()
    with plain_values_only(tmp_path, trusted=True):
        checkpoint_formats._stored(tmp_path, TORCH, lazily=True)
    assert mark.exists()


@pytest.mark.parametrize(
    "value",
    [
        {"args": Namespace(a=1, b=[None, "c"]), "iteration": 3, "slime_lora": {"rank": 4}},
        {"random_rng_state": random.Random(1).getstate(), "bytes": b"\xff"},
        {"dtype": torch.bfloat16, "size": torch.Size((2, 3)), "set": {1, 2}},
    ],
)
def test_plain_values_are_read(value):
    assert loads(pickle.dumps(value)) == value


def test_random_states_and_tensors_are_read(tmp_path):
    state = {"np": np.random.RandomState(1).get_state(), "torch": torch.arange(5), "step": np.float64(3)}
    with plain_values_only(tmp_path):
        found = loads(pickle.dumps(state))
    assert found["np"][0] == "MT19937"
    assert (found["np"][1] == state["np"][1]).all()
    assert torch.equal(found["torch"], state["torch"])
    assert found["step"] == 3


def test_plain_values_between_tensors_are_read(tmp_path):
    held = [np.float64(0.5), np.int64(3), np.bool_(True), np.arange(3), random.Random(1).getstate(), Namespace(a=[1])]
    dcp.save({"a": torch.ones(1), "b": held}, checkpoint_id=tmp_path / "c", no_dist=True)
    wanted = {"a": torch.zeros(1), "b": [None] * len(held)}
    with plain_values_only(tmp_path / "c"):
        dcp.load(wanted, checkpoint_id=tmp_path / "c", no_dist=True)
    assert (wanted["b"][0], wanted["b"][1], wanted["b"][2]) == (0.5, 3, True)
    assert wanted["b"][3].tolist() == [0, 1, 2]
    assert wanted["b"][4:] == held[4:]


def test_plans_of_several_ranks_in_the_metadata_are_read(tmp_path):
    """megatron-core keeps them there for the next save."""
    planner = DefaultSavePlanner()
    planner.set_up_planner({"a": torch.ones(2), "b": [1]}, is_coordinator=True)
    plan = planner.create_local_plan()
    _, metadata = planner.create_global_plan([plan])
    metadata.all_local_plans = [plan]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    check_metadata(tmp_path)


def test_records_of_megatron_are_read():
    import_megatron()
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.rerun_state_machine import RerunMode
    from megatron.core.transformer.enums import AttnBackend

    held = Namespace(attention=AttnBackend.flash, rerun=RerunMode.DISABLED, optimizer=OptimizerConfig(lr=0.5))
    assert loads(pickle.dumps({"args": held})) == {"args": held}


@pytest.mark.parametrize(
    "payload",
    [
        b"cos\nsystem\n(S'true'\ntR.", b"cbuiltins\neval\n(S'1'\ntR.", b"cbuiltins\ngetattr\n.", b"ctorch\nload\n.",
        pickle.dumps(os.system), pickle.dumps(print), pickle.dumps(torch.nn.Linear), pickle.dumps(pickle.loads),
        b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x09os.system\x93.",
        b"\x80\x04\x8c\x08builtins\x8c\x0cset.__init__\x93.",
    ],
)  # fmt: skip
def test_functions_are_not_found(payload):
    with pytest.raises(UntrustedPickle):
        loads(payload)


def test_metadata_of_torch_is_plain_and_the_environment_stays(root, monkeypatch):
    check_metadata(root / "iter_0000003")
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with plain_values_only(root / "iter_0000003"):
        assert os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] == "1"
        assert "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD" not in os.environ
    assert os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] == "1"
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ

"""Rollout dumps, and training from them."""

from __future__ import annotations

import enum
import pickle
import threading

import numpy as np
import pytest
import torch

from slime.rollout import forge_load
from slime.rollout.debug_data import load_rollout, save_rollout, save_tokenizer, subsample
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample
from tests.support.arguments import run_args
from tools.tiny_model import make_tiny_checkpoint


def samples(count: int) -> list[Sample]:
    return [
        Sample(index=i, group_index=i // 2, tokens=[i], reward=float(i), status=Sample.Status.TRUNCATED)
        for i in range(count)
    ]


def test_dumps_round_trip(tmp_path):
    one = Sample(index=3, tokens=[1, 2], metadata={"a": [1, {"b": (2,)}]}, rollout_routed_experts=torch.ones(1, 2, 3))
    one.note = np.arange(3)
    one.handle = threading.Lock()
    save_rollout(tmp_path / "deep" / "7.pt", 7, [one])
    assert torch.load(tmp_path / "deep" / "7.pt", weights_only=True)["rollout_id"] == 7
    (again,) = load_rollout(tmp_path / "deep" / "7.pt")
    assert (again.index, again.tokens, again.metadata) == (3, [1, 2], {"a": [1, {"b": [2]}]})
    assert torch.equal(again.rollout_routed_experts, torch.ones(1, 2, 3))
    assert again.note.tolist() == [0, 1, 2]
    assert not hasattr(again, "handle")
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["7.pt"]


def test_dumps_of_older_releases_with_arrays_load(tmp_path):
    entry = {**Sample(index=1).to_dict(), "scores": np.arange(4, dtype=np.float32), "one": np.int64(5)}
    torch.save({"rollout_id": 0, "samples": [entry]}, tmp_path / "0.pt")
    (again,) = load_rollout(tmp_path / "0.pt")
    assert again.scores.tolist() == [0, 1, 2, 3]
    assert again.one == 5


class Evil:
    def __reduce__(self):
        return (print, ("code ran",))


def test_dumps_with_code_in_them_are_refused(tmp_path, capsys):
    (tmp_path / "x.pt").write_bytes(pickle.dumps({"samples": [Evil()]}))
    torch.save({"samples": [Evil()]}, tmp_path / "y.pt")
    for name in ("x.pt", "y.pt"):
        with pytest.raises(ValueError, match="not a rollout dump that can be read safely"):
            load_rollout(tmp_path / name)
    assert "code ran" not in capsys.readouterr().out
    with pytest.raises(FileNotFoundError):
        load_rollout(tmp_path / "z.pt")


def test_a_field_that_cannot_be_dumped_is_an_error(tmp_path):
    with pytest.raises(TypeError, match="sample index=2: field 'metadata'"):
        save_rollout(tmp_path / "0.pt", 0, [Sample(index=2, metadata={"x": threading.Lock()})])


@pytest.mark.parametrize(
    ("count", "ratio", "kept"),
    [
        (10, 0.5, [0, 1, 7, 8, 9]),
        (10, 0.4, [0, 1, 8, 9]),
        (10, 0.1, [9]),
        (10, 1.0, list(range(10))),
        (3, 0.1, []),
        (0, 0.5, []),
    ],
)
def test_subsampling_keeps_both_ends(count, ratio, kept):
    assert [s.index for s in subsample(samples(count), ratio)] == kept


def test_forge_load(tmp_path):
    save_rollout(tmp_path / "0.pt", 0, samples(4))
    save_rollout(tmp_path / "eval_1.pt", 1, samples(3))
    args = run_args(load_forge_rollout_data=f"{tmp_path}/{{rollout_id}}.pt")
    for rollout_id in (0, 5):  # 5 falls back to 0
        output = forge_load.generate_rollout(args, rollout_id, None)
        assert [[s.index for s in group] for group in output.samples] == [[0, 1], [2, 3]]
    data = forge_load.generate_rollout(args, 1, None, evaluation=True).data["forge_eval"]
    assert data["rewards"] == [0.0, 1.0, 2.0]
    assert data["truncated"] == [True] * 3
    args.load_forge_rollout_data = str(tmp_path / "0.pt")
    assert len(forge_load.generate_rollout(args, 9, None).samples) == 2
    with pytest.raises(ValueError, match=r"with \{rollout_id} in it"):
        forge_load.generate_rollout(args, 1, None, evaluation=True)
    with pytest.raises(ValueError, match="--load-forge-rollout-data"):
        forge_load.generate_rollout(run_args(), 0, None)


def test_samples_without_a_group_stay_alone(tmp_path):
    save_rollout(tmp_path / "0.pt", 0, [Sample(index=i) for i in range(3)])
    output = forge_load.generate_rollout(run_args(load_forge_rollout_data=str(tmp_path / "0.pt")), 0, None)
    assert [len(group) for group in output.samples] == [1, 1, 1]


def test_the_tokenizer_is_written_beside_the_dumps(tmp_path):
    """``--dump-details``: a dump's token ids can be read without the checkpoint; a text model has no processor."""
    checkpoint = make_tiny_checkpoint(tmp_path / "model", num_layers=1)
    save_tokenizer(run_args(hf_checkpoint=str(checkpoint), dump_details=str(tmp_path / "details")))
    saved = load_tokenizer(str(tmp_path / "details" / "tokenizer"))
    assert saved.encode("1 + 2 = 3") == load_tokenizer(str(checkpoint)).encode("1 + 2 = 3")
    assert not (tmp_path / "details" / "processor").exists()


class Verdict(str, enum.Enum):  # noqa: UP042 - another str() than StrEnum
    RIGHT = "right"


class Level(enum.IntEnum):
    HARD = 3


def test_enums_that_are_strings_or_numbers_are_dumped_as_these(tmp_path):
    one = Sample(
        index=0, metadata={"verdict": Verdict.RIGHT, (Verdict.RIGHT, 2): Level.HARD, np.str_("x"): [Level.HARD]}
    )
    save_rollout(tmp_path / "0.pt", 0, [one])
    (again,) = load_rollout(tmp_path / "0.pt")
    assert again.metadata == {"verdict": "right", ("right", 2): 3, "x": [3]}
    assert {type(value) for value in (again.metadata["verdict"], again.metadata["x"][0])} == {str, int}

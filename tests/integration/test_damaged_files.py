"""Every file of a checkpoint that a resume reads is compared with what was written; damage is refused by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.distributed import run_distributed
from tests.support.trainer import tiny_checkpoint

CASES: dict[str, dict[str, Any]] = {
    "torch_dist": {},
    "in the background": {"async_save": True},
    "torch": {"ckpt_format": "torch"},
    "torch_dcp": {"ckpt_format": "torch_dcp"},
    "adapters": {"lora_rank": 2},
}


def found(tmp_path: Path, case: str, flips: int) -> list[dict[str, Any]]:
    arguments = {
        "checkpoint": tiny_checkpoint(tmp_path / "model", seed=0), "folder": str(tmp_path), "flips": flips,
        "flags": CASES[case],
    }  # fmt: skip
    ranks: list[dict[str, Any]] = run_distributed(
        "tests.support.damage_ranks:damage_every_file", 2, arguments, timeout=600
    )
    return ranks


def check(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["said"] == ranks[0]["said"]
        wrong = {
            what: said for what, said in rank["said"].items() if what.rpartition(":")[0].rpartition("/")[2] not in said
        }
        # Without its tracker a directory is none of checkpoints; what it was is in the note, which a start looks at.
        assert not {what: said for what, said in wrong.items() if not what.endswith(".digest: gone")}
        assert rank["iteration"] == 1
        assert rank["same"]
        kinds = {Path(path).suffix or Path(path).name for path in rank["read"]}
        assert {".json", ".txt", ".digest"} <= kinds


@pytest.mark.parametrize("case", ["torch_dist", "adapters"])
def test_damage_is_refused_with_the_name_of_the_file(tmp_path: Path, case: str) -> None:
    check(found(tmp_path, case, flips=4))


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES)
def test_many_flips_in_every_format(tmp_path: Path, case: str) -> None:
    check(found(tmp_path, case, flips=100))


def test_digests_that_are_gone_are_missed(tmp_path: Path) -> None:
    arguments = {"checkpoint": tiny_checkpoint(tmp_path / "model", seed=0), "folder": str(tmp_path)}
    (rank,) = run_distributed("tests.support.damage_ranks:without_digests", 1, arguments, timeout=180)
    assert rank["lost"].endswith("iter_0000000 has lost its digests.json. Choose another iteration with --ckpt-step")

"""State that ``--ckpt-format torch`` and ``torch_dcp`` cannot store is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.arguments.errors import ArgumentError
from tests.support.arguments import parse


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("torch", "--async-save"), "is written while training waits: leave out --async-save"),
        (("torch", "--lora-rank", "4"), "no adapters: leave out --lora-rank"),
        (("torch_dcp", "--tensor-model-parallel-size", "2"), "an undivided model: leave out --tensor-model-parallel"),
        (("torch_dcp", "--pipeline-model-parallel-size", "2"), "an undivided model: leave out --pipeline-model"),
        (("torch_dcp", "--optimizer", "sgd"), "the state of Adam: leave out --optimizer sgd"),
        (("zarr",), "--ckpt-format zarr is not available yet"),
    ],
)
def test_combinations_without_a_meaning_are_refused(flags: tuple[str, ...], says: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=says):
        parse(
            "--save", str(tmp_path), "--save-interval", "1", "--actor-num-gpus-per-node", "2", "--ckpt-format", *flags
        )


@pytest.mark.parametrize("flags", [("torch", "--tensor-model-parallel-size", "2"), ("torch_dcp",)])
def test_the_others_are_taken(flags: tuple[str, ...], tmp_path: Path) -> None:
    gpus = ("--actor-num-gpus-per-node", "2")
    args = parse(
        *gpus,
        "--save",
        str(tmp_path),
        "--save-interval",
        "1",
        "--actor-num-gpus-per-node",
        "2",
        "--ckpt-format",
        *flags,
    )
    assert args.ckpt_format == flags[0]

"""Values that no one means: every one is refused by a short message that names its flag, and at once."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from slime.arguments.errors import ArgumentError
from slime.arguments.files import yaml_source
from tests.support.arguments import parse

YAML_FLAGS = ("--custom-config-path", "--config", "--eval-config", "--sglang-config", "--megatron-config-path")


def refused(*words: str) -> str:
    begun = time.monotonic()
    with pytest.raises(ArgumentError) as error:
        parse(*words)
    assert time.monotonic() - begun < 20
    assert len(str(error.value)) < 4000
    return str(error.value)


@pytest.mark.parametrize("flag", ["--sglang-pp-size", "--save", "--lr", "--no-such-flag", "--num-rollout"])
def test_two_dashes_are_no_value(flag: str) -> None:
    assert refused(f"{flag}=--").startswith((f"{flag}: expected a value, got '--'", f"unknown flag {flag}"))


def test_two_dashes_after_another_name_of_a_flag() -> None:
    assert refused("--sglang-pp=--") == "--sglang-pp-size: expected a value, got '--'"


@pytest.mark.parametrize("flag", ["--save", "--load", "--ref-load", "--prompt-data", "--hf-checkpoint", *YAML_FLAGS])
@pytest.mark.parametrize("length", [400, 100_000])
def test_a_path_that_no_file_system_takes(flag: str, length: int) -> None:
    more = ["--save-interval", "1"] if flag == "--save" else []
    assert flag in refused(flag, "9" * length, *more)


@pytest.mark.parametrize("flag", ["--rm-type", "--lr", "--sglang-pp-size", "--advantage-estimator", "--no-such-flag"])
def test_a_long_value_is_not_repeated(flag: str) -> None:
    assert flag in refused(flag, "x" * 100_000)
    assert flag in refused(flag, "x y " * 25_000)


def test_a_long_name_is_not_repeated() -> None:
    assert refused("--" + "x" * 100_000).startswith("unknown flag --xxx")


@pytest.mark.parametrize("path", ["/proc/nothing/x.yaml", "9" * 400])
def test_a_configuration_that_cannot_be_dumped(path: str) -> None:
    assert "cannot be written" in refused("--dump-config", path)


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)


@pytest.mark.parametrize("flag", YAML_FLAGS)
def test_aliases_of_aliases(tmp_path: Path, flag: str) -> None:
    (tmp_path / "x.yaml").write_text(LAUGHS)
    assert f"{flag} {tmp_path}/x.yaml: this is no YAML: its aliases" in refused(flag, f"{tmp_path}/x.yaml")


def test_aliases_that_people_use_are_read(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("base: &base {a: 1, b: [1, 2]}\nother: [*base, *base, {<<: *base, c: 3}]\n")
    found = yaml_source.read(f"{tmp_path}/x.yaml", "--x")
    assert found.data["other"] == [{"a": 1, "b": [1, 2]}] * 2 + [{"a": 1, "b": [1, 2], "c": 3}]


@pytest.mark.parametrize("flag", YAML_FLAGS)
def test_a_file_without_an_end(flag: str) -> None:
    assert f"{flag} /dev/zero: " in refused(flag, "/dev/zero")


def test_a_pipe_is_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=("a: 1\n",))
    writer.start()
    assert yaml_source.read(f"{tmp_path}/pipe", "--x").data == {"a": 1}
    writer.join()

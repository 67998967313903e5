"""The examples' functions by the names of slime <= 0.3.1, as modules of ``examples`` and on PYTHONPATH."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples import older_names
from slime.arguments.files.environments import environments_of
from slime.rollout.hooks.contracts import contracts_of
from slime.rollout.hooks.hook import checked_hook
from slime.utils.misc import load_function
from slime.utils.types import Sample
from tests.support.arguments import run_args

ROOT = Path(__file__).parents[3]
NAMES = {
    "examples.retool.generate_with_retool": "examples.retool.environment.Retool",
    "examples.search_r1.generate_with_search": "examples.search_r1.environment.Search",
    "examples.tau_bench.generate_with_tau": "examples.tau_bench.environment.TauBench",
}
FOLDERS = {
    "examples/retool": "generate_with_retool",
    "examples/search-r1": "generate_with_search",
    "examples/tau-bench": "generate_with_tau",
    "examples/strands_sglang": "generate_with_strands",
}


@pytest.mark.parametrize(("module", "environment"), NAMES.items())
async def test_they_play_in_the_examples_environment(module: str, environment: str, monkeypatch: Any) -> None:
    played: list[Any] = []

    async def play(args: Any, sample: Sample, sampling_params: Any, evaluation: bool) -> Sample:
        (entry,) = environments_of(args).values()
        played.append((entry.path, evaluation))
        sample.reward = 0.5
        return sample

    monkeypatch.setattr(older_names, "play", play)
    args = run_args()
    sample = await load_function(f"{module}.generate")(args, Sample(), {}, evaluation=True)
    assert played == [(environment, True)]
    assert (args.environment_path, args.environment_config) == (None, None)
    assert await load_function(f"{module}.reward_func")(args, sample) == 0.5
    args.environment_path = ["examples.retool.environment.Retool"]
    await load_function(f"{module}.generate")(args, Sample(), {})
    assert played[-1] == ("examples.retool.environment.Retool", False)


@pytest.mark.parametrize("module", [*NAMES, "examples.strands_sglang.generate_with_strands"])
def test_they_have_the_forms_of_their_flags(module: str) -> None:
    for name, flag in (("generate", "custom_generate_function_path"), ("reward_func", "custom_rm_path")):
        checked_hook(f"{module}.{name}", contracts_of("manager")[flag], f"--{flag}")


def test_folders_on_the_path() -> None:
    program = f"import sys; sys.path[:0] = {[str(ROOT), *(str(ROOT / folder) for folder in FOLDERS)]!r}\n"
    program += "\n".join(f"import {name}; {name}.generate, {name}.reward_func" for name in FOLDERS.values())
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)

"""Flags are read without any heavy package: at once, on machines that have none of them."""

from __future__ import annotations

import pytest

from tests.support.arguments import minimal_flags
from tests.support.imports import watch

HEAVY = (
    "torch", "ray", "megatron", "sglang", "sglang_router", "smg", "transformers", "numpy", "pandas", "pyarrow",
    "aiohttp", "wandb", "tensorboard", "omegaconf",
)  # fmt: skip
PROGRAM = "import runpy; runpy.run_path('train.py', run_name='__main__')"


def test_importing_the_flags_is_light_and_quick():
    """Half a second of processor time; the least of three, because a machine does other things too."""
    reports = [watch("import slime.arguments; from slime.arguments import parse_args", HEAVY) for _ in range(3)]
    assert not reports[0].offenders, reports[0].explain()
    assert min(report.seconds for report in reports) < 0.5


@pytest.mark.parametrize(
    ("words", "status"),
    [(["--help"], 0), (["--help", "rollout"], 0), (["--rollout-bach-size", "8"], 2), (["--dry-run"], 2)],
    ids=["help", "search", "typo", "incomplete"],
)
def test_answers_load_nothing_heavy(words, status):
    report = watch(PROGRAM, HEAVY, words)
    assert not report.offenders, report.explain()
    assert report.status == status


def test_a_dry_run_loads_nothing_heavy():
    report = watch(PROGRAM, HEAVY, [*minimal_flags(), "--dry-run"])
    assert not report.offenders, report.explain()
    assert report.status == 0, report.output


def test_a_whole_command_line_loads_nothing_heavy():
    code = "from slime.arguments import finalize_for_device, parse_args, to_yaml\n"
    code += "args = parse_args(); finalize_for_device(args, 'cpu'); to_yaml(args)\n"
    code += "import slime.utils.arguments, slime.utils.eval_config"
    report = watch(code, HEAVY, minimal_flags())
    assert not report.offenders, report.explain()


def test_the_guard_names_the_chain():
    report = watch("import slime.arguments.parse", ["pydantic"])
    chain = report.offenders["pydantic"]
    assert chain[:2] == ["__main__", "<code>"]
    assert chain[-1].startswith("slime.arguments.")
    assert "pydantic: imported by __main__ -> <code> -> slime.arguments" in report.explain()

"""Imports stay light: flags are read at once and without any heavy package, the math without a framework."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.arguments import minimal_flags
from tests.support.imports import watch
from tools.tiny_model import make_tiny_checkpoint

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


def test_a_dry_run_loads_nothing_heavy(tmp_path):
    """Tokenizer and data are read by a child process."""
    checkpoint = make_tiny_checkpoint(tmp_path / "model")
    words = [*minimal_flags(), "--hf-checkpoint", str(checkpoint), "--dry-run"]
    report = watch(PROGRAM, HEAVY, words)
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


def test_algorithms_and_batching_load_no_framework() -> None:
    """The math is usable where neither Ray nor a trainer nor an engine is installed."""
    script = (
        "import importlib, pkgutil, sys, slime.algorithms, slime.batching\n"
        "for package in (slime.algorithms, slime.batching):\n"
        "    for module in pkgutil.iter_modules(package.__path__, package.__name__ + '.'):\n"
        "        importlib.import_module(module.name)\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules}"
        " & {'ray', 'megatron', 'sglang', 'transformers', 'transformer_engine'}))\n"
        "print(*sorted({'.'.join(name.split('.')[:2]) for name in sys.modules if name.startswith('slime.')}))\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    frameworks, rooms = result.stdout.split("\n")[:2]
    assert frameworks == ""
    # `import slime` installs the old paths of slime.compat; FLOPs and shapes are in slime.models.
    assert rooms.split() == ["slime.algorithms", "slime.batching", "slime.compat", "slime.models", "slime.utils"]


def test_hooks_and_losses_import_without_megatron_or_an_engine() -> None:
    code = (
        "import sys, slime.backends.megatron_utils.train.hooks, slime.backends.megatron_utils.train.loss\n"
        "import slime.algorithms.mis\n"
        "import examples.train_infer_mismatch_helper.mis\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'megatron', 'ray', 'sglang', 'transformers'}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.strip() == "[]"

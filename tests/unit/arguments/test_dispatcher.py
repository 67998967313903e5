"""DeepEP where it can be imported, alltoall where it cannot; nothing else about the run changes."""

from __future__ import annotations

import importlib.util

import pytest

from slime.arguments import finalize_for_device
from tests.support.arguments import dry, parse

MOE = [
    "--hf-checkpoint",
    "/nowhere/model",
    "--num-experts",
    "4",
    "--actor-num-gpus-per-node",
    "2",
    "--expert-model-parallel-size",
    "2",
    "--global-batch-size",
    "4",
    "--debug-train-only",
]
FLEX = [*MOE, "--moe-token-dispatcher-type", "flex"]
CHOICES = ([], ["--moe-enable-deepep"], ["--moe-flex-dispatcher-backend", "hybridep"], ["--moe-deepep-num-sms", "24"])


@pytest.fixture
def installed(monkeypatch):
    """As if ``deep_ep`` were there."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: name == "deep_ep" or find(name, *more))


def resolved(words, monkeypatch):
    """Return the arguments that a run resolves from ``words``, without a checkpoint."""
    monkeypatch.setattr("slime.arguments.diagnostics.unavailable", lambda args, message: None)
    monkeypatch.setattr("slime.arguments.rules.hf_config.read_config", lambda *given: {})
    return parse(*words)


@pytest.mark.parametrize("choice", CHOICES)
def test_it_passes_where_it_is_installed(choice, installed, monkeypatch, capsys):
    args = resolved([*FLEX, *choice], monkeypatch)
    assert args.moe_token_dispatcher_type == "flex"
    assert args.moe_enable_deepep is ("--moe-enable-deepep" in choice)
    assert args.moe_flex_dispatcher_backend == ("hybridep" if "hybridep" in choice else "deepep")
    assert "flex" not in capsys.readouterr().err


@pytest.mark.parametrize("choice", CHOICES)
def test_alltoall_takes_its_place_elsewhere(choice, monkeypatch, capsys):
    args = resolved([*FLEX, *choice], monkeypatch)
    said = capsys.readouterr().err
    assert "warning: --moe-token-dispatcher-type flex: the package deep_ep, which it needs, is not installed" in said
    same = resolved([*MOE, *[word for word in choice if word != "--moe-enable-deepep"]], monkeypatch)
    differing = {name for name, value in vars(args).items() if getattr(same, name) != value}
    assert differing <= {"explicit_flags", "replaced_values"}


def test_a_dry_run_keeps_it_and_says_what_it_could_not_see():
    args = dry(*FLEX, "--moe-enable-deepep")
    assert (args.moe_token_dispatcher_type, args.moe_enable_deepep) == ("flex", True)
    assert any("deep_ep" in message for message in args.unchecked)
    assert not any("flex" in message for message in args.warnings)


def test_without_a_gpu_alltoall_is_used(installed, monkeypatch):
    args = resolved([*FLEX, "--moe-enable-deepep"], monkeypatch)
    finalize_for_device(args, "cpu")
    assert (args.moe_token_dispatcher_type, args.moe_enable_deepep) == ("alltoall", False)

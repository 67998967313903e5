"""A checkout of Megatron-LM on the PYTHONPATH, as launch scripts have it, decides about no flag unless it is chosen."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.arguments.command_line import all_flags
from slime.arguments.errors import ArgumentError
from slime.arguments.passthrough import catalog, megatron, source
from tests.support.arguments import parse
from tests.support.megatron_checkout import install_core, make_checkout


def _forget() -> None:
    for cached in (all_flags, megatron.megatron_flags, megatron._training_scripts):
        cached.cache_clear()


@pytest.fixture
def checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    root = make_checkout(tmp_path / "Megatron-LM")
    monkeypatch.syspath_prepend(str(root))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SLIME_MEGATRON_CORE", raising=False)
    _forget()
    yield root
    monkeypatch.undo()
    _forget()


def test_the_flags_are_those_of_the_installed_core_and_a_warning_says_so(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(catalog, "read_installed", lambda which: pytest.fail(f"{which.package} was read"))
    assert source.identity(catalog.MEGATRON) == catalog.MEGATRON.pinned
    defaults = {flag.dest: flag.default for flag in megatron.megatron_flags()}
    assert defaults["norm_epsilon"] == 1e-5  # the checkout's parser says 0.125
    parse()
    (warning,) = megatron.warnings()
    assert f"warning: {warning}" in capsys.readouterr().err
    assert f"the installed {catalog.MEGATRON.pinned}, not the copy in {checkout}" in warning
    assert "SLIME_MEGATRON_CORE=checkout" in warning


def test_chosen_it_is_used_and_its_parser_has_the_last_word(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_MEGATRON_CORE", "checkout")
    assert source.checkout(catalog.MEGATRON) == checkout / "megatron" / "core"
    assert source.checkout(catalog.MEGATRON_LM) == checkout / "megatron" / "training"
    shipped = catalog.records(catalog.ROUTER)  # any list will do: what is checked is whose it is
    monkeypatch.setattr(catalog, "records", lambda which: shipped if which is catalog.MEGATRON else [])
    (warning,) = megatron.warnings()
    assert warning.startswith(f"megatron.core is the copy in {checkout}, as SLIME_MEGATRON_CORE=checkout says")


def test_its_training_scripts_are_read_with_its_own_core(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_MEGATRON_CORE", "checkout")
    defaults = {record["dest"]: record["default"] for record in catalog.read_installed(catalog.MEGATRON_LM)}
    assert defaults["norm_epsilon"] == 0.125


def test_a_value_that_is_none_is_a_wrong_command_line(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_MEGATRON_CORE", "mine")
    with pytest.raises(ArgumentError, match="SLIME_MEGATRON_CORE must be installed or checkout, got 'mine'"):
        parse()


def test_the_reader_of_another_installed_version_does_not_see_the_checkout(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The list of a version that is not the pinned one is read in a helper process, which inherits the PYTHONPATH."""
    assert str(checkout) not in catalog._environment(catalog.MEGATRON)["PYTHONPATH"].split(os.pathsep)
    monkeypatch.setenv("SLIME_MEGATRON_CORE", "checkout")
    assert str(checkout) in catalog._environment(catalog.MEGATRON)["PYTHONPATH"].split(os.pathsep)


def test_without_an_installed_core_the_checkout_is_all_there_is(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "installed_directory", lambda which: None)
    assert source.unused_core() is None
    assert source.checkout(catalog.MEGATRON) == checkout / "megatron" / "core"


def test_of_two_installed_ones_the_first_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(install_core(tmp_path / "site", "7.0")))
    assert source.unused_core() is None
    assert source.identity(catalog.MEGATRON) == "7.0"

"""A run that does not look, and one that ends with what the look has found."""

from __future__ import annotations

import pytest

from slime import driver
from slime.arguments import ArgumentError
from slime.preflight.look import Findings
from slime.preflight.look.start import look
from tests.support.arguments import dry


def test_it_can_be_left_out(flags):
    assert look(dry(*flags, "--custom-rm-path", "no.such", "--skip-first-look")) == Findings()


def test_a_run_ends_before_it_has_made_anything(flags, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(driver, "look", lambda args: Findings(["no column x", "no function y"], ["odd"]))
    with pytest.raises(ArgumentError, match=r"^no column x\nno function y$"):
        driver.train(dry(*flags))
    assert "odd" in caplog.messages
    assert list(tmp_path.iterdir()) == []

"""The megatron.core that is imported where a checkout of Megatron-LM comes first, and the other modules found there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.megatron_checkout import OTHER_VERSION, install_core, make_checkout

ROOT = Path(__file__).parents[4]
INSTALLED = "7.0"


def python(program: str, *paths: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "SLIME_MEGATRON_CORE"}
    env |= {"PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT))), **variables}
    return subprocess.run([sys.executable, "-c", program], env=env, text=True, capture_output=True, check=False)


USE = "from slime.backends.megatron_utils import prefer_installed_core\nprefer_installed_core()\n"
LOOK = """
import importlib, megatron.core
print(megatron.core.__version__)
for name in ("core.only_here", "training.arguments", "training.broken", "legacy"):
    try:
        importlib.import_module("megatron." + name)
        print(name, "there")
    except ImportError as e:
        print(name, e.name)
"""


@pytest.mark.parametrize(("regular", "before"), [(False, ""), (False, "import megatron\n"), (True, "")])
def test_the_installed_core_and_the_rest_of_the_checkout(tmp_path: Path, regular: bool, before: str) -> None:
    site = install_core(tmp_path / "site", INSTALLED)
    checkout = make_checkout(tmp_path / "Megatron-LM", regular=regular)
    done = python(before + USE + LOOK, checkout, site)
    assert done.stdout.split("\n")[:-1] == [
        INSTALLED,
        "core.only_here megatron.core.only_here",
        "training.arguments there",
        "training.broken a_package_that_nobody_has",
        "legacy there",
    ], done.stderr


def test_the_checkout_where_it_is_chosen_or_alone_and_nothing_where_there_is_none(tmp_path: Path) -> None:
    site = install_core(tmp_path / "site", INSTALLED)
    checkout = make_checkout(tmp_path / "Megatron-LM")
    chosen = python(USE + LOOK, checkout, site, SLIME_MEGATRON_CORE="checkout")
    assert chosen.stdout.split("\n")[:2] == [OTHER_VERSION, "core.only_here there"], chosen.stderr
    without = python(USE + "import sys; print('megatron' in sys.modules)", site)
    assert without.stdout == "False\n", without.stderr
    behind = python(USE + LOOK, site, checkout)
    assert behind.stdout.startswith(f"{INSTALLED}\n"), behind.stderr
    wrong = python(USE, checkout, site, SLIME_MEGATRON_CORE="mine")
    assert "SLIME_MEGATRON_CORE must be installed or checkout, got 'mine'" in wrong.stderr


def test_one_that_was_imported_too_early_is_named(tmp_path: Path) -> None:
    site = install_core(tmp_path / "site", INSTALLED)
    checkout = make_checkout(tmp_path / "Megatron-LM")
    done = python("import megatron.core\n" + USE, checkout, site)
    assert done.returncode == 1
    assert f"megatron.core was imported from {checkout}/megatron/core before slime could choose" in done.stderr
    assert "SLIME_MEGATRON_CORE=checkout" in done.stderr

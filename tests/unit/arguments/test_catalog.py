"""Argument lists: read once per installed version, cached, and read again when the cache is of no use."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from slime.arguments.errors import ArgumentError
from slime.arguments.passthrough import catalog, source

ROOT = Path(__file__).parents[3]


@pytest.fixture
def other_version(monkeypatch, tmp_path):
    """An installed SGLang 99.0 whose list is read from nowhere; returns the list of reads."""
    reads: list[source.Source] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(catalog, "_kept", {})
    monkeypatch.setattr(catalog, "identity", lambda which: "99.0")
    monkeypatch.setattr(catalog, "read_installed", lambda which: reads.append(which) or [{"dest": "new"}])
    return reads


def test_another_version_is_read_once_and_cached(other_version) -> None:
    for _ in range(2):
        assert catalog.records(catalog.SGLANG) == [{"dest": "new"}]
    assert other_version == [catalog.SGLANG]
    (cached,) = catalog.cache_directory().iterdir()
    assert cached.name.startswith("sglang-99.0-")
    assert json.loads(cached.read_text()) == [{"dest": "new"}]


@pytest.mark.parametrize("content", ['[{"dest": "n', "", "{}", "[1]", "null", "\x00"])
def test_a_damaged_cache_is_read_again_and_repaired(other_version, content: str) -> None:
    catalog.records(catalog.SGLANG)
    (cached,) = catalog.cache_directory().iterdir()
    cached.write_text(content)
    assert catalog.records(catalog.SGLANG) == [{"dest": "new"}]
    assert json.loads(cached.read_text()) == [{"dest": "new"}]
    assert len(other_version) == 2


def test_a_cache_that_cannot_be_written_is_said_and_done_without(other_version, capsys, monkeypatch, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        assert catalog.records(catalog.SGLANG) == [{"dest": "new"}]
    assert "cannot cache the argument list" in capsys.readouterr().err
    assert len(other_version) == 1  # kept for as long as the process lives


def test_a_user_without_a_home_has_no_cache(other_version, monkeypatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    for _ in range(2):
        assert catalog.records(catalog.SGLANG) == [{"dest": "new"}]
    assert len(other_version) == 1


def test_readers_of_another_slime_have_a_cache_of_their_own(other_version, monkeypatch) -> None:
    catalog.records(catalog.SGLANG)
    monkeypatch.setattr(catalog, "reader_digest", lambda: "other")
    catalog.records(catalog.SGLANG)
    assert len(other_version) == 2
    assert len(list(catalog.cache_directory().iterdir())) == 2


def test_two_processes_that_write_at_once_leave_one_whole_list(tmp_path) -> None:
    """Each writes a long list of its own 30 times; whoever is last, the file is one of the two."""
    target = tmp_path / "list.json"
    script = (
        "import json, pathlib, sys; from slime.arguments.passthrough import catalog\n"
        "for _ in range(30): catalog.write_atomically(pathlib.Path(sys.argv[1]), json.dumps([sys.argv[2]] * 20000))"
    )
    writers = [subprocess.Popen([sys.executable, "-c", script, str(target), name]) for name in ("a", "b")]
    seen = 0
    while any(writer.poll() is None for writer in writers):
        if target.exists():
            found = json.loads(target.read_text())
            assert len(found) == 20000
            assert len(set(found)) == 1
            seen += 1
    assert [writer.returncode for writer in writers] == [0, 0]
    assert seen > 0
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


def test_a_package_that_is_not_installed_here_has_the_pinned_flags(monkeypatch) -> None:
    monkeypatch.setattr(catalog, "identity", lambda which: None)
    assert len(catalog.records(catalog.MEGATRON)) > 250
    assert catalog.version_words(catalog.MEGATRON) == "0.16.1 (it is not installed here)"


def test_the_shipped_lists_are_those_of_the_required_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [*project["dependencies"], *(r for rs in project["optional-dependencies"].values() for r in rs)]
    for which in catalog.SOURCES:
        assert f"{which.package}=={which.pinned}" in required
        assert catalog.shipped_list(which).is_file()


class TestIdentity:
    """The package that a list belongs to."""

    PACKAGE = source.Source("a-package", "1.0", "", "a_package_of_tests", ("declared.py",))

    @pytest.fixture
    def package(self, monkeypatch, tmp_path):
        directory = tmp_path / "site" / "a_package_of_tests"
        directory.mkdir(parents=True)
        (directory / "declared.py").write_text("x = 1")
        information = tmp_path / "site" / "a_package-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text("Metadata-Version: 2.1\nName: a-package\nVersion: 1.0\n")
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        return directory

    def test_an_installed_package_is_its_version(self, package) -> None:
        assert source.identity(self.PACKAGE) == "1.0"

    def test_a_checkout_in_front_of_it_is_its_contents(self, package, monkeypatch, tmp_path) -> None:
        """The installed version says nothing about it, and the shipped list is not its list."""
        checkout = tmp_path / "checkout" / "a_package_of_tests"
        checkout.mkdir(parents=True)
        (checkout / "declared.py").write_text("x = 1")
        monkeypatch.syspath_prepend(str(tmp_path / "checkout"))
        first = source.identity(self.PACKAGE)
        assert first.startswith("1.0-")
        (checkout / "other.py").write_text("y = 1")
        assert source.identity(self.PACKAGE) == first
        (checkout / "declared.py").write_text("x = 2")
        assert source.identity(self.PACKAGE) != first

    def test_nothing_is_nothing(self) -> None:
        assert source.identity(self.PACKAGE) is None


class TestReading:
    @pytest.fixture
    def reader(self, monkeypatch, tmp_path):
        """A script in place of the reader, for a test to write."""
        monkeypatch.setattr(catalog, "READER", tmp_path / "reader.py")
        monkeypatch.delenv("PYTHONPATH", raising=False)
        return catalog.READER

    def test_a_failing_reader_says_why(self, reader) -> None:
        reader.write_text("raise SystemExit('no such thing')\n")
        with pytest.raises(
            ArgumentError,
            match=r"cannot read the arguments of .* thing .*\n.*no such thing\nInstall thing==",
        ):
            catalog.read_installed(source.Source("thing", "1.0", "broken", "thing", ()))

    def test_stand_ins_are_seen_by_sglangs_reader_only(self, reader, monkeypatch) -> None:
        reader.write_text("import json, os, sys\njson.dump([os.environ['PYTHONPATH']], open(sys.argv[2], 'w'))\n")
        monkeypatch.setattr(catalog, "has_cuda_device", lambda: False)
        assert catalog.read_installed(catalog.SGLANG) == [str(catalog.STAND_INS)]
        assert catalog.read_installed(catalog.MEGATRON) == [""]
        assert str(catalog.STAND_INS) not in sys.path
        assert list(catalog.STAND_INS.iterdir())

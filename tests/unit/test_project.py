"""The repository as a whole: what is committed installs anywhere, and what it says about itself is true."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

IMPORT_NAMES = {
    "PIL": "pillow", "yaml": "pyyaml", "megatron": "megatron-core", "sglang_router": "sglang-router", "grpc": "grpcio",
}  # fmt: skip
OPTIONAL = {
    "sglang": "installed by the set-up without its dependencies, or by the gpu extra",
    "transformer_engine": "used where it is installed", "flash_attn": "used where it is installed",
    "torch_memory_saver": "comes with sglang on GPUs", "triton": "comes with torch on GPUs",
    "setproctitle": "comes with sglang",
    "math_verify": "the math extra", "smg": "the routers extra", "e2b": "the agents extra",
    "openai": "used in sandboxes, and installed there",
    "qwen_vl_utils": "the plugins extra", "mcp": "the plugins extra",
    "memray": "for --memory-recorder memray", "pynvml": "comes with sglang",
    "torchvision": "a stand-in", "slime_engine_plugin": "loaded inside engine processes", "sgl_kernel": "a stand-in",
    "huggingface_hub": "comes with transformers", "tokenizers": "comes with transformers",
    "nixl": "the p2p extra", "mbridge": "the mbridge extra", "mooncake": "for --update-weight-p2p-backend mooncake",
    "llmcompressor": "for GPTQ in tools.convert",
    "httpx": "of users, where it is installed", "httpcore": "comes with httpx",
    "typer": "comes with transformers", "blake3": "for --update-weight-delta-checksum blake3",
}  # fmt: skip


def test_what_plugins_expect_to_find_is_an_extra_of_its_own() -> None:
    names = {"pandas", "mcp", "openai-agents", "qwen-vl-utils"}
    extra = {re.split(r"[<>=\[; ]", line)[0] for line in PROJECT["optional-dependencies"]["plugins"]}
    assert extra == names
    assert not names & {re.split(r"[<>=\[; ]", line)[0] for line in PROJECT["dependencies"]}
    page = (ROOT / "docs" / "en" / "get_started" / "customization.md").read_text()
    assert all(name in page.partition("## Packages of plugins")[2] for name in names)


@pytest.fixture(scope="module")
def committed() -> list[Path]:
    """The files that git tracks or would track."""
    result = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    files = [ROOT / name for name in result.stdout.decode().split("\0") if name]
    return [f for f in files if f.is_file()]


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


INSTALL_FILES = re.compile(
    r"(^|/)(pyproject\.toml|Makefile|setup\.py|lock\.py|Dockerfile.*|\.pre-commit-config\.yaml|run|requirements/.*)$"
)
ONE_MACHINE = {
    "a file:// address": re.compile(r"file:/" r"/"),
    "a wheel directory": re.compile(r"--find-links|-f \S*wheel|/opt/(wheels|pypi)"),
    "an index address": re.compile(r"--(extra-)?index-url|PIP_INDEX_URL|simple/?(?=[\"'\s]|$)"),
    "a wheel file": re.compile(r"\.whl\b"),
}


def test_what_installs_names_no_machine(committed):
    found = []
    for path in committed:
        name = path.relative_to(ROOT).as_posix()
        if not INSTALL_FILES.search(name):
            continue
        found += [f"{name}: {what}" for what, pattern in ONE_MACHINE.items() if pattern.search(text_of(path))]
    assert found == []


def test_no_file_names_paths_of_one_machine(committed):
    pattern = re.compile(r"(/opt/(wheels|pypi)|/root/|/work/(main|plan|shared)|/home/[a-z]+/)")
    assert [
        f"{p.relative_to(ROOT)}: {m[0]}" for p in committed if p != Path(__file__) and (m := pattern.search(text_of(p)))
    ] == []


def test_constraints_are_names_and_versions_only():
    for line in (ROOT / "requirements" / "lock.txt").read_text().splitlines():
        assert re.fullmatch(r"#.*|[A-Za-z0-9._-]+==[A-Za-z0-9.!]+", line), line
        assert not line.lower().startswith(("torch==", "triton==", "nvidia-", "cuda-"))


def test_the_lock_satisfies_what_the_project_asks_for():
    rows = [line.split("==") for line in (ROOT / "requirements" / "lock.txt").read_text().splitlines() if "==" in line]
    locked = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in rows}
    lines = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]
    for name in ("sglang-cpu.txt", "no-deps.txt"):
        lines = lines + [x for x in (ROOT / "requirements" / name).read_text().splitlines() if not x.startswith("#")]
    for requirement in map(Requirement, lines):
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name != "torch":
            assert requirement.specifier.contains(locked[name]), f"{requirement} against {locked[name]}"


def imports_of(path: Path) -> set[str]:
    """Return the packages that are imported at run time, not for types alone."""
    found = set()
    tree = ast.parse(text_of(path))
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    for_types = {node for block in blocks for statement in block.body for node in ast.walk(statement)}
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def test_every_imported_package_is_declared():
    declared = {re.sub(r"[-_.]+", "-", Requirement(line).name).lower() for line in PROJECT["dependencies"]}
    own = {"slime", "slime_plugins", "tools", "examples"}
    missing = {}
    for path in (ROOT / "slime").rglob("*.py"):
        if "cpu_standins" in path.parts:
            continue
        for name in imports_of(path) - own - set(sys.stdlib_module_names) - set(OPTIONAL):
            if IMPORT_NAMES.get(name, name).replace("_", "-").lower() not in declared:
                missing.setdefault(name, path.relative_to(ROOT).as_posix())
    assert missing == {}


def test_the_wheel_holds_every_file_of_the_package(committed, tmp_path):
    """Data files and the directories that engines put on their PYTHONPATH are part of an installed slime too."""
    source = tmp_path / "source"
    for path in committed:
        name = path.relative_to(ROOT)
        if name.parts[0] in ("slime", "slime_plugins", "pyproject.toml", "README.md", "LICENSE"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes(path.read_bytes())
    code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=source, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stdout + result.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        inside = set(wheel.namelist())
    packaged = {p.relative_to(ROOT).as_posix() for p in committed if p.relative_to(ROOT).parts[0] == "slime"}
    assert {name for name in packaged - inside if not name.endswith(".md")} == set()


def test_no_source_file_is_too_long_to_read(committed):
    long = {
        p.relative_to(ROOT).as_posix(): n
        for p in committed
        if p.suffix == ".py" and (n := text_of(p).count("\n")) > 600
    }
    assert long == {}


def test_no_unfinished_business(committed):
    pattern = re.compile(r"#\s*(TODO|FIXME|XXX|HACK)\b")
    sources = [p for p in committed if p.suffix == ".py" and p != Path(__file__)]
    assert [p.relative_to(ROOT).as_posix() for p in sources if pattern.search(text_of(p))] == []


def test_the_ci_script_runs_make_test():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()


@pytest.mark.parametrize("target", ["setup", "quickstart", "test", "unit", "soak", "lint", "docs", "clean"])
def test_make_targets_exist(target):
    result = subprocess.run(
        ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )
    assert result.returncode == 0, result.stderr


def test_the_setup_script_runs_on_any_python_and_needs_nothing():
    """It must be able to say what is wrong on a machine that has only an old Python and no packages."""
    tree = ast.parse((ROOT / "tools" / "setup.py").read_text(), feature_version=(3, 8))
    imported = {n.split(".")[0] for n in imports_of(ROOT / "tools" / "setup.py")}
    assert tree.body
    assert imported <= set(sys.stdlib_module_names)
    assert "tomllib" not in imported

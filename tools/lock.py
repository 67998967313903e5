"""Write ``requirements/lock.txt``: the version of every package that the CPU set-up installs, from this environment.

Run it in an environment that passes the tests (``.venv/bin/python tools/lock.py``); ``--check`` only compares. Versions
are written without local tags (``2.13.0``, not ``2.13.0+cpu``) and torch is left out: the set-up freezes the torch
build that the machine got.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements" / "lock.txt"
EXTRAS = ("dev", "routers")


def requirement_lines(path: Path) -> list[str]:
    """Return the requirements of a requirements file, without comments."""
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


def roots() -> list[Requirement]:
    """Return what the CPU set-up asks for by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = list(project["dependencies"])
    for extra in EXTRAS:
        lines += project["optional-dependencies"][extra]
    lines += requirement_lines(ROOT / "requirements" / "sglang-cpu.txt")
    return [Requirement(line) for line in lines]


def closure() -> dict[str, str]:
    """Return ``{name: version}`` of the roots and everything they need, as installed here.

    Packages installed without dependencies are listed without theirs. Raises SystemExit when one is missing.
    """
    without_deps = [Requirement(line) for line in requirement_lines(ROOT / "requirements" / "no-deps.txt")]
    found = {r.name: metadata.version(r.name) for r in without_deps}
    todo = [(r, "the project") for r in roots()]
    seen: set[tuple[str, str]] = set()
    while todo:
        requirement, wanted_by = todo.pop()
        name = canonicalize_name(requirement.name)
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            raise SystemExit(f"lock: {requirement} (needed by {wanted_by}) is not installed here") from None
        if not requirement.specifier.contains(distribution.version, prereleases=True):
            raise SystemExit(f"lock: {wanted_by} needs {requirement}, {distribution.version} is installed")
        found[name] = distribution.version.split("+")[0]
        for extra in ["", *requirement.extras]:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for line in distribution.requires or ():
                needed = Requirement(line)
                if needed.marker is None:
                    applies = extra == ""
                else:
                    applies = needed.marker.evaluate({"extra": extra})
                if applies:
                    todo.append((needed, name))
    del found["torch"]
    return found


def render(versions: dict[str, str]) -> str:
    """Return the text of the lock file."""
    head = "# Constraints of the CPU set-up, written by tools/lock.py: do not edit. torch is frozen at run time.\n"
    lines = sorted((f"{name}=={version}\n" for name, version in versions.items()), key=str.lower)
    return head + "".join(lines)


def main() -> int:
    """Write or check the lock file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 when the file differs from this environment")
    options = parser.parse_args()
    text = render(closure())
    if not options.check:
        LOCK.write_text(text)
        print(f"wrote {len(text.splitlines()) - 1} versions to {LOCK.relative_to(ROOT)}")
        return 0
    if LOCK.read_text() == text:
        return 0
    old, new = set(LOCK.read_text().splitlines()), set(text.splitlines())
    print("\n".join([f"- {line}" for line in sorted(old - new)] + [f"+ {line}" for line in sorted(new - old)]))
    return 1


if __name__ == "__main__":
    sys.exit(main())

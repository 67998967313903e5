"""Run the soak tests part by part, and keep a record of the parts that passed: ``make soak``.

    python -m tools.soak [PART ...] [--list] [--stale] [--again]

The parts are in ``tests/soak/parts.toml``. A part is one pytest process of at most 45 minutes on two cores. Without
names every part runs that is not in the record, so that the same command continues where it was stopped, days and
commits later. ``tests/soak/passed.tsv`` is the record, one row per part with the commit; it is written for committed
files only. ``--stale`` runs what passed with other files than those of now as well, ``--again`` everything.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, dataclass, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = Path("tests/soak/parts.toml")
RECORD = Path("tests/soak/passed.tsv")
LIMIT_MINUTES = 45
NO_EFFECT = (":!docs", ":!*.md", f":!{RECORD}")
"""Files that no soak test reads the behavior of: a change of them makes no record stale."""


@dataclass(frozen=True)
class Passed:
    """A row of the record: what passed, at which commit, and what it took."""

    part: str
    commit: str
    minutes: float
    passed: int
    skipped: int
    cores: int


def read_parts(path: Path = ROOT / PARTS) -> dict[str, list[str]]:
    """Return ``{part: entries}``; an entry is a folder, a file or a test id, with or without its parameters."""
    parts: dict[str, list[str]] = tomllib.loads(path.read_text())
    return parts


def names(entry: str, test: str) -> bool:
    """Return True if ``test``, a test id or another entry, is ``entry`` or lies below it."""
    return test == entry or test.startswith((f"{entry}/", f"{entry}::", f"{entry}["))


def part_of(test: str, parts: dict[str, list[str]]) -> list[str]:
    """Return the parts that the test id ``test`` is in: those of the longest entry that names it."""
    named = [(len(entry), part) for part, entries in parts.items() for entry in entries if names(entry, test)]
    longest = max((length for length, _ in named), default=0)
    return [part for length, part in named if length == longest]


def pytest_words(part: str, parts: dict[str, list[str]]) -> list[str]:
    """Return what selects the tests of ``part``: its entries, without those below that are another part's."""
    others = [entry for name, entries in parts.items() if name != part for entry in entries]
    below = [entry for entry in others if any(names(mine, entry) for mine in parts[part])]
    return [*parts[part], *(word for entry in below for word in ("--deselect", entry))]


def read_record(root: Path = ROOT) -> dict[str, Passed]:
    """Return the last pass of each part."""
    path = root / RECORD
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    kinds = {"minutes": float, "passed": int, "skipped": int, "cores": int}
    return {row["part"]: Passed(**{name: kinds.get(name, str)(row[name]) for name in row}) for row in rows}


def write_record(record: dict[str, Passed], root: Path = ROOT) -> None:
    """Replace the record, sorted by part."""
    path = root / RECORD
    with path.with_suffix(".new").open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Passed)], delimiter="\t", lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(record[part]) for part in sorted(record))
    path.with_suffix(".new").replace(path)


def git(*words: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run git in the checkout."""
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)


def changed_since(commit: str, root: Path = ROOT) -> bool:
    """Return True if a file that matters differs from ``commit``, is new, or the commit is unknown."""
    if git("diff", "--quiet", commit, "--", ".", *NO_EFFECT, root=root).returncode:
        return True
    return bool(git("ls-files", "--others", "--exclude-standard", "--", ".", *NO_EFFECT, root=root).stdout)


def run_part(part: str, parts: dict[str, list[str]], root: Path = ROOT) -> Passed | None:
    """Run one part; return what to record, or None when a test failed or none ran."""
    results = root / "build" / "soak"
    results.mkdir(parents=True, exist_ok=True)
    report, durations = results / f"{part}.xml", results / f"{part}.txt"
    command = [
        sys.executable, "-m", "pytest", "-m", "soak or gpu", "-rA", f"--junitxml={report}",
        f"--durations-file={durations}", *os.environ.get("PYTEST_FLAGS", "").split(), *pytest_words(part, parts),
    ]  # fmt: skip
    begin = time.monotonic()
    code = subprocess.call(command, cwd=root)
    minutes = (time.monotonic() - begin) / 60
    if code:
        print(f"[soak] {part}: failed after {minutes:.1f} min (exit status {code})", flush=True)
        return None
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    skipped = int(suite.attrib["skipped"])
    passed = int(suite.attrib["tests"]) - skipped
    if not passed:
        print(f"[soak] {part}: every test was skipped, so nothing is recorded; the reasons are above", flush=True)
        return None
    if minutes > LIMIT_MINUTES:
        print(f"[soak] {part}: {minutes:.1f} min, more than {LIMIT_MINUTES}: divide it in {PARTS}", flush=True)
    commit = git("rev-parse", "--short=12", "HEAD", root=root).stdout.strip()
    return Passed(part, commit, round(minutes, 1), passed, skipped, len(os.sched_getaffinity(0)))


def is_due(last: Passed | None, *, named: bool, stale: bool, again: bool, root: Path = ROOT) -> bool:
    """Return whether a part runs that passed as ``last`` says, None for one that has not passed."""
    return last is None or named or again or (stale and changed_since(last.commit, root))


def show(parts: dict[str, list[str]]) -> None:
    """Print every part with its last pass."""
    record = read_record()
    for part, entries in parts.items():
        last = record.get(part)
        state = "not passed yet"
        if last:
            stale = ", files have changed since" if changed_since(last.commit) else ""
            state = f"{last.passed} passed, {last.skipped} skipped in {last.minutes} min at {last.commit}{stale}"
        print(f"{part:24} {state}\n{'':24} {' '.join(entries)}")


def main() -> int:
    """Run or list parts; 1 when one did not pass, 2 for a name that is none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*", help="names of parts, which run in any case (default: all not recorded)")
    parser.add_argument("--list", action="store_true", help="print the parts and what passed when; runs nothing")
    parser.add_argument("--stale", action="store_true", help="also run what passed before files have changed")
    parser.add_argument("--again", action="store_true", help="run everything")
    options = parser.parse_args()
    parts = read_parts()
    if unknown := set(options.part) - set(parts):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; parts are {', '.join(parts)}")
    if options.list:
        show(parts)
        return 0
    missing = []
    for part in options.part or parts:
        last = read_record().get(part)
        if last and not is_due(last, named=bool(options.part), stale=options.stale, again=options.again):
            print(f"[soak] {part}: passed at {last.commit} ({last.minutes} min), not run again", flush=True)
            continue
        print(f"[soak] {part}: begins", flush=True)
        before = git("rev-parse", "HEAD").stdout.strip()
        passed = run_part(part, parts)
        if passed is None:
            missing.append(part)
            continue
        print(f"[soak] {part}: {passed.passed} passed, {passed.skipped} skipped in {passed.minutes} min", flush=True)
        if changed_since(before):
            print(f"[soak] {part}: not recorded, files are not committed or changed meanwhile", flush=True)
        else:
            write_record({**read_record(), part: passed})
    if missing:
        print(f"[soak] did not pass: {' '.join(missing)}. The same command runs them again, and only them.", flush=True)
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())

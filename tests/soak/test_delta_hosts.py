"""Many pushes of changes through files, with hosts and trainers that are killed: hosts have the weights, to the bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from slime.weight_sync import files
from slime.weights import versions as version_files
from slime.weights.delta.host_copy import pull
from tests.support.delta_run import DeltaRun, content_of, run_until_line

pytestmark = pytest.mark.soak

PUSHES = 50


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_many_pushes_with_kills(encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begins with the directories of another run; at random a host is killed at any line, a trainer is lost in the
    middle of a version, or resumed, and a host is late.
    """
    chance = random.Random(encoding)
    flags = {"update_weight_delta_encoding": encoding, "update_weight_delta_full_interval": 9}
    make = partial(DeltaRun, tmp_path, monkeypatch, hosts=2, **flags)
    stale = make(seed=1)
    for _ in range(4):
        stale.push()
    run, kinds, events = make(), [], []
    for number in range(PUSHES):
        event = chance.choice(("", "", "", "", "kill a host", "lose the trainer", "resume", "a late host"))
        if number % 10 == 9:
            event = ("kill a host", "lose the trainer", "resume", "a late host")[number // 10 % 4]
        events.append(event)
        if event == "a late host":
            run.hosts = [*run.hosts[:1], tmp_path / f"late{number}"]
        if event == "lose the trainer":
            lose(run, monkeypatch, chance.randrange(5))
        if event in ("lose the trainer", "resume"):
            before = run
            run = make()
            run.weights, run.hosts = before.weights, before.hosts
        part = chance.choice((0.0, 0.001, 0.02, 0.1, 0.25, 0.5))
        if event == "kill a host":
            kill_a_host(run, part, chance)
        else:
            run.push(part)
        kinds.append(run.kinds()[run.files.version])
    assert {"kill a host", "lose the trainer", "resume", "a late host"} <= set(events)
    assert kinds.count("whole") < PUSHES * 2 / 3


def lose(run: DeltaRun, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """End the trainer while it writes the next version, when so many tensors have been compared."""
    run.train(0.1)
    compared = 0

    def compare_and_end(*given: object, **more: object) -> object:
        nonlocal compared
        compared += 1
        if compared > after:
            raise KeyboardInterrupt
        return encode(*given, **more)  # type: ignore[arg-type]

    encode = files.encode
    monkeypatch.setattr(files, "encode", compare_and_end)
    try:
        run.files.push([], True)  # or it ends in time: a whole version compares nothing
    except KeyboardInterrupt:
        pass
    finally:
        monkeypatch.setattr(files, "encode", encode)


def kill_a_host(run: DeltaRun, part: float, chance: random.Random) -> None:
    """Push while the first host ends at a random line of its update; it updates again when it is back."""
    run.train(part)
    (first, *others), run.hosts = run.hosts, run.hosts[1:]
    version = run.files.push([], True)
    run.hosts = [first, *others]
    source = version_files.version_dir(run.shared, version)
    run_until_line(lambda: pull(source, first), chance.randrange(1, 400))
    for host in run.hosts:
        assert content_of(pull(source, host)) == run.expected[version]

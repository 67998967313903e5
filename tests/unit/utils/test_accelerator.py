from __future__ import annotations

import mmap
import subprocess
import sys
from collections.abc import Iterator

import pytest

from slime.utils import accelerator
from slime.utils.accelerator import CpuAccelerator


class Abacus(CpuAccelerator):
    device_type = "abacus"
    communication_backend = "beads"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("SLIME_ACCELERATOR", raising=False)
    monkeypatch.setattr(accelerator, "_kinds", dict(accelerator._kinds))
    accelerator.reset_accelerator()
    yield
    accelerator.reset_accelerator()


def test_importing_it_does_not_import_torch() -> None:
    code = "import sys, slime.utils.accelerator; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_cuda_wins_where_it_is_available_and_the_cpu_elsewhere() -> None:
    import torch

    assert accelerator.device_type() == ("cuda" if torch.cuda.is_available() else "cpu")


def test_cpu_facade() -> None:
    import torch

    accelerator.set_accelerator("cpu")
    assert accelerator.device_type() == "cpu"
    assert accelerator.communication_backend() == "gloo"
    assert accelerator.current_device() == torch.device("cpu")
    accelerator.set_device(3)
    accelerator.synchronize()
    accelerator.empty_cache()


def test_cpu_memory_is_in_bytes_and_adds_up() -> None:
    accelerator.set_accelerator("cpu")
    stats = accelerator.memory_stats()
    assert stats["total"] == stats["free"] + stats["used"]
    assert 2**20 < stats["allocated"] < stats["total"]
    # A mapping of its own: memory from the allocator may be some that this process freed but still holds.
    with mmap.mmap(-1, 64 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        for _ in range(64):  # piece by piece: the allocator may keep a large one when it is freed
            block.write(b"\1" * 2**20)
        grown = accelerator.memory_stats()["allocated"] - stats["allocated"]
    assert 60 * 2**20 < grown < 80 * 2**20


def test_the_highest_available_priority_is_chosen() -> None:
    accelerator.register_accelerator("abacus", Abacus, is_available=lambda: True, priority=1000)
    assert accelerator.device_type() == "abacus"
    accelerator.reset_accelerator()
    accelerator.register_accelerator("abacus", Abacus, is_available=lambda: False, priority=1000)
    assert accelerator.device_type() != "abacus"


def test_environment_selects(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator.register_accelerator("abacus", Abacus, priority=-1, communication_backends=("beads", "gloo"))
    monkeypatch.setenv("SLIME_ACCELERATOR", "abacus")
    assert accelerator.communication_backend() == "beads"


def test_the_choice_is_kept_until_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_ACCELERATOR", "cpu")
    chosen = accelerator.get_accelerator()
    monkeypatch.setenv("SLIME_ACCELERATOR", "nonsense")
    assert accelerator.get_accelerator() is chosen
    accelerator.reset_accelerator()
    with pytest.raises(ValueError, match="nonsense"):
        accelerator.get_accelerator()


def test_unknown_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_ACCELERATOR", "cudaa")
    with pytest.raises(ValueError, match=r"SLIME_ACCELERATOR='cudaa'.*known: \['cpu', 'cuda'\]"):
        accelerator.device_type()
    with pytest.raises(ValueError, match="not registered"):
        accelerator.set_accelerator("tpu")


def test_asking_for_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator.register_accelerator("abacus", Abacus, is_available=lambda: False)
    monkeypatch.setenv("SLIME_ACCELERATOR", "abacus")
    with pytest.raises(RuntimeError, match="sees no such device"):
        accelerator.device_type()


def test_initialize_selects_the_local_rank() -> None:
    chosen = []

    class Recorder(Abacus):
        def set_device(self, index: int) -> None:
            chosen.append(index)

    accelerator.register_accelerator("recorder", Recorder, priority=2000)
    assert isinstance(accelerator.initialize_accelerator(2), Recorder)
    assert chosen == [2]


def test_cuda_device_index_out_of_range() -> None:
    import torch

    accelerator.set_accelerator("cuda")
    with pytest.raises(ValueError, match=f"sees {torch.cuda.device_count()} CUDA"):
        accelerator.set_device(99)

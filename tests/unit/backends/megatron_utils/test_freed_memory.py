from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator

import pytest
import torch

from slime.backends.megatron_utils.initialize import keep_freed_memory

GLIBC = getattr(ctypes.CDLL(None), "mallopt", None)


@pytest.fixture
def restored() -> Iterator[None]:
    yield
    assert GLIBC is not None
    assert GLIBC(-1, 128 << 10)  # M_TRIM_THRESHOLD
    assert GLIBC(-3, 128 << 10)  # M_MMAP_THRESHOLD
    assert ctypes.CDLL(None).malloc_trim(0)


def _page_faults_of_a_step() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(1 << 20) for _ in range(64)]  # 256 MiB
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(GLIBC is None, reason="not glibc")
@pytest.mark.usefixtures("restored")
def test_the_second_step_finds_the_memory_of_the_first() -> None:
    assert keep_freed_memory({})
    _page_faults_of_a_step()
    assert _page_faults_of_a_step() < 6400  # a tenth of the pages


def test_settings_of_the_user_win() -> None:
    assert not keep_freed_memory({"MALLOC_TRIM_THRESHOLD_": "1048576"})

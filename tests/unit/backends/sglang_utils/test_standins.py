"""The stand-in kernel does what the compiled one does; what has no stand-in says so."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
import torch

from slime.backends.sglang_utils.environment import CPU_STANDINS


@pytest.fixture(scope="module")
def sgl_kernel() -> ModuleType:
    """The stand-in, loaded by path under another name, so that nothing else in this process can import it."""
    spec = importlib.util.spec_from_file_location("sgl_kernel_under_test", CPU_STANDINS / "sgl_kernel" / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_cache_slots_go_to_the_rows_and_columns_of_their_requests(sgl_kernel: ModuleType) -> None:
    table = torch.zeros(4, 6, dtype=torch.int32)
    sgl_kernel.assign_req_to_token_pool_cpu(
        torch.tensor([2, 0, 3]),
        table,
        torch.tensor([1, 0, 4]),
        torch.tensor([3, 3, 4]),
        torch.tensor([11, 12, 21, 22, 23], dtype=torch.int64),
        table.shape[1],
    )
    # request 0 takes 2 slots in row 2, request 1 takes 3 in row 0, request 2 none
    expected = torch.tensor([[21, 22, 23, 0, 0, 0], [0] * 6, [0, 11, 12, 0, 0, 0], [0] * 6], dtype=torch.int32)
    assert torch.equal(table, expected)


def test_other_cpu_kernels_import_and_raise_when_called(sgl_kernel: ModuleType) -> None:
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.verify_tree_greedy_cpu"):
        sgl_kernel.verify_tree_greedy_cpu(1, 2)


def test_other_names_are_missing_so_that_sglang_falls_back(sgl_kernel: ModuleType) -> None:
    assert not hasattr(sgl_kernel, "silu_and_mul")

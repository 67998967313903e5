"""The stand-in kernel does what the compiled one does; what has no stand-in says so."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
import torch

from slime.backends.sglang_utils.environment import CPU_STANDINS


@pytest.fixture(scope="module")
def sgl_kernel() -> ModuleType:
    return load("__init__")


@pytest.fixture(scope="module")
def mamba() -> ModuleType:
    return load("mamba")


def load(name: str) -> ModuleType:
    """Load a stand-in by path under another name, so that nothing else in this process can import it."""
    path = CPU_STANDINS / "sgl_kernel" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"sgl_kernel_under_test{name}", path)
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


def test_delta_rule_of_chunks_and_of_single_tokens(mamba: ModuleType) -> None:
    """A sequence of several chunks and a short one, one token after them, and a state that is not used."""
    generator = torch.Generator().manual_seed(0)
    lengths, slots, heads, dim = [150, 3], torch.tensor([2, 0]), 4, 8
    sizes = {"q": (2, dim), "k": (2, dim), "v": (heads, dim), "a": (heads,), "b": (heads,)}
    inputs = [
        {name: torch.randn(length + 1, *size, generator=generator) for name, size in sizes.items()}
        for length in lengths
    ]
    gates = {"A_log": torch.rand(heads, generator=generator), "dt_bias": torch.randn(heads, generator=generator)}
    first = torch.randn(3, heads, dim, dim, generator=generator)
    pool = first.clone()

    tokens = {name: torch.cat([x[name][:-1] for x in inputs]) for name in sizes}
    g, beta = mamba.fused_gdn_gating_cpu(a=tokens.pop("a"), b=tokens.pop("b"), **gates)
    output, _, _ = mamba.chunk_gated_delta_rule_cpu(
        **{name: x[None] for name, x in tokens.items()}, g=g, beta=beta, initial_state=pool,
        initial_state_indices=slots, cu_seqlens=torch.tensor([0, 150, 153]), head_first=False,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    last = {name: torch.stack([x[name][-1] for x in inputs]) for name in sizes}
    one_more = mamba.fused_sigmoid_gating_delta_rule_update_cpu(
        **{name: last[name][None] if name in "qkv" else last[name] for name in sizes}, **gates,
        initial_state_source=pool, initial_state_indices=slots, cu_seqlens=torch.tensor([0, 1, 2]),
        use_qk_l2norm_in_kernel=True, softplus_beta=1.0, softplus_threshold=20.0,
    )  # fmt: skip

    assert torch.equal(pool[1], first[1])
    start = 0
    for i, (length, slot) in enumerate(zip(lengths, slots.tolist(), strict=True)):
        expected, state = apply_delta_rule(first[slot], **inputs[i], **gates)
        found = torch.cat([output[0, start : start + length], one_more[:, i]])
        torch.testing.assert_close(found, expected.float(), rtol=0, atol=1e-6)
        torch.testing.assert_close(pool[slot], state.float(), rtol=0, atol=1e-6)
        start += length


def apply_delta_rule(state: torch.Tensor, **inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the rule to one sequence in fp64, token by token and head by head; return outputs and the last state."""
    x = {name: tensor.double() for name, tensor in inputs.items()}
    state, heads, dim = state.double().clone(), len(state), state.shape[2]
    outputs = torch.zeros(len(x["v"]), heads, dim, dtype=torch.float64)
    for t in range(len(outputs)):
        for head in range(heads):
            query, key = (x[name][t, head // 2] for name in "qk")
            query, key = (y / (y @ y + 1e-6).sqrt() for y in (query, key))
            decay = (-x["A_log"][head].exp() * torch.log1p((x["a"][t, head] + x["dt_bias"][head]).exp())).exp()
            kept = decay * state[head]
            write = torch.sigmoid(x["b"][t, head]) * (x["v"][t, head] - kept @ key)
            state[head] = kept + torch.outer(write, key)
            outputs[t, head] = state[head] @ query / dim**0.5
    return outputs, state


@pytest.mark.parametrize("bias", [None, torch.tensor([0.5, -0.5, 0.25])])
def test_convolutions_continue_where_their_states_end(mamba: ModuleType, bias: torch.Tensor | None) -> None:
    generator = torch.Generator().manual_seed(0)
    x, other = (torch.randn(3, n, generator=generator) for n in (9, 2))
    weight = torch.randn(3, 4, generator=generator)
    pool = torch.full((3, 3, 3), 7.0)

    def prefill(x: torch.Tensor, starts: list[int], slots: list[int], continued: list[bool]) -> torch.Tensor:
        return mamba.causal_conv1d_fn_cpu(
            x, weight, bias, activation="silu", conv_states=pool, has_initial_state=torch.tensor(continued),
            cache_indices=torch.tensor(slots), query_start_loc=torch.tensor(starts),
        )  # fmt: skip

    together = prefill(torch.cat([x[:, :5], other], dim=1), [0, 5, 7], [2, 0], [False, False])
    then = prefill(x[:, 5:8], [0, 3], [2], [True])
    slot = torch.tensor([2])
    last = mamba.causal_conv1d_update_cpu(x[:, 8:].T, pool, weight, bias, "silu", conv_state_indices=slot)

    padded = torch.cat([torch.zeros(3, 3), x], dim=1).double()
    sums = sum(weight[:, i, None].double() * padded[:, i : i + 9] for i in range(4))
    expected = torch.as_tensor(sums) + (0 if bias is None else bias[:, None].double())
    expected = (expected * torch.sigmoid(expected)).float()
    torch.testing.assert_close(torch.cat([together[:, :5], then, last.T], dim=1), expected, rtol=0, atol=1e-6)
    assert torch.equal(pool[2], x[:, 6:])
    assert torch.equal(pool[0], torch.cat([torch.zeros(3, 1), other], dim=1))
    assert torch.equal(pool[1], torch.full((3, 3), 7.0))

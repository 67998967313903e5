from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn as TORCH_VARLEN

from slime.backends.megatron_utils import import_megatron

import_megatron()
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402

from slime.backends.megatron_utils.model import attention  # noqa: E402
from slime.backends.megatron_utils.model.attention import Segment, TorchCoreAttention, packed_segments  # noqa: E402
from tests.support.dense_attention import dense_attention, undo_zigzag_pack, zigzag  # noqa: E402
from tests.support.megatron_checks import attention_config  # noqa: E402


class OneRank:
    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def _module(mask_type: AttnMaskType = AttnMaskType.causal, **config: Any) -> TorchCoreAttention:
    groups = SimpleNamespace(cp=OneRank(), tp=OneRank())
    return TorchCoreAttention(attention_config(**config), 1, mask_type, "self", pg_collection=groups)


def _tensors(total: int, heads: int, groups: int, dim: int = 8, value_dim: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(total + heads)
    shapes = [(total, heads, dim), (total, groups, dim), (total, groups, value_dim), (total, heads, value_dim)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def _params(lengths: list[int]) -> PackedSeqParams:
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu)


def _check(
    out: torch.Tensor,
    inputs: list[torch.Tensor],
    lengths: list[int],
    grad: torch.Tensor,
    causal: bool,
    window: int | None = None,
) -> None:
    """Compare output and gradients of ``inputs`` with the dense reference."""
    out.backward(grad.reshape(out.shape))
    reference = [x.detach().double().requires_grad_() for x in inputs]
    expected = dense_attention(*reference, lengths, causal=causal, window=window)
    expected.backward(grad.double())
    torch.testing.assert_close(out.detach().double().reshape(expected.shape), expected.detach(), atol=2e-6, rtol=1e-5)
    for seen, wanted in zip(inputs, reference, strict=True):
        torch.testing.assert_close(seen.grad.double(), wanted.grad, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("lengths", [[7], [5, 1, 9], [4, 0, 3], [4, 4, 4], [3, 3, 5, 5, 3]])
@pytest.mark.parametrize("causal", [True, False])
def test_packed(lengths: list[int], heads: int, groups: int, causal: bool) -> None:
    *inputs, grad = _tensors(sum(lengths), heads, groups)
    inputs = [x.requires_grad_() for x in inputs]
    out = _module(AttnMaskType.causal if causal else AttnMaskType.no_mask)(*inputs, packed_seq_params=_params(lengths))
    assert out.shape == (sum(lengths), 1, heads * 8)
    _check(out, inputs, lengths, grad, causal)


@pytest.mark.parametrize("window", [1, 3, 150])
@pytest.mark.parametrize("lengths", [[7], [5, 1, 9], [2, 0, 3], [4, 4, 4], [300, 12, 400, 400]])
def test_windows(lengths: list[int], window: int) -> None:
    """Longer than a block of queries, which is 128 or the window, and shorter."""
    *inputs, grad = _tensors(sum(lengths), 4, 2)
    inputs = [x.requires_grad_() for x in inputs]
    out = _module(window_size=(window - 1, 0))(*inputs, packed_seq_params=_params(lengths))
    _check(out, inputs, lengths, grad, True, window)


@pytest.mark.parametrize("window", [None, 3, 150])
@pytest.mark.parametrize("lengths", [[7], [5, 1, 9], [2, 0, 3], [300, 12, 400, 400]])
@pytest.mark.parametrize("kind", ["learnable", "off-by-one"])
def test_sinks(kind: str, lengths: list[int], window: int | None) -> None:
    *inputs, grad = _tensors(sum(lengths), 4, 2)
    inputs = [x.requires_grad_() for x in inputs]
    module = _module(softmax_type=kind, window_size=window and (window - 1, 0))
    if kind == "learnable":
        module.softmax_offset.data.copy_(torch.tensor([-1.0, 0.0, 1.0, 2.0]))
    sinks = module.softmax_offset.detach().double().requires_grad_()
    out = module(*inputs, packed_seq_params=_params(lengths))
    out.backward(grad.reshape(out.shape))
    reference = [x.detach().double().requires_grad_() for x in inputs]
    expected = dense_attention(*reference, lengths, window=window, sinks=sinks)
    expected.backward(grad.double())
    torch.testing.assert_close(out.detach().double().reshape(expected.shape), expected.detach(), atol=2e-6, rtol=1e-5)
    for seen, wanted in zip(inputs, reference, strict=True):
        torch.testing.assert_close(seen.grad.double(), wanted.grad, atol=5e-6, rtol=1e-5)
    if kind == "learnable":
        torch.testing.assert_close(module.softmax_offset.grad.double(), sinks.grad, atol=1e-5, rtol=1e-5)


def test_a_window_makes_no_mask_of_queries_times_keys() -> None:
    """A block of 128 queries with a window of 5 sees 132 keys at most."""
    q, k, v, _ = _tensors(1000, 4, 2)
    masks: list[tuple[int, ...]] = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def noted(*inputs: torch.Tensor, attn_mask: torch.Tensor, **options: Any) -> torch.Tensor:
        masks.append(tuple(attn_mask.shape))
        return plain(*inputs, attn_mask=attn_mask, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention.F, "scaled_dot_product_attention", noted)
        attention.attend([Segment(q[None], k[None], v[None])], causal=True, scale=1.0, window=5)
    assert masks == [(128, 128), *[(128, 132)] * 6, (104, 108)]


def test_windows_in_the_layers_that_the_frequency_names() -> None:
    """As Megatron reads it: the last of every two layers has none."""
    *inputs, _ = _tensors(9, 4, 2)
    groups = SimpleNamespace(cp=OneRank(), tp=OneRank())
    config = attention_config(window_size=(2, 0), window_attn_skip_freq=2)
    for layer, window in ((1, 3), (2, None)):
        module = TorchCoreAttention(config, layer, AttnMaskType.causal, "self", pg_collection=groups)
        seen = module(*inputs, packed_seq_params=_params([9])).view(9, 4, 8)
        torch.testing.assert_close(seen.double(), dense_attention(*inputs, [9], window=window), atol=2e-6, rtol=1e-5)


def test_windows_of_tokens_to_come_are_refused() -> None:
    with pytest.raises(ValueError, match="--window-size 3,3"):
        _module(window_size=(3, 3))
    with pytest.raises(ValueError, match="causal"):
        _module(AttnMaskType.no_mask, window_size=(3, 0))


def test_neighbors_of_one_length_are_one_segment_without_a_copy() -> None:
    query, key, value, _ = _tensors(21, 4, 2)
    segments = packed_segments(query, key, value, [4, 4, 0, 4, 9])
    assert [tuple(s.q.shape) for s in segments] == [(2, 4, 4, 8), (1, 4, 4, 8), (1, 9, 4, 8)]
    for whole, name in zip((query, key, value), "qkv", strict=True):
        parts = [getattr(s, name) for s in segments]
        assert all(part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() for part in parts)
        assert torch.equal(torch.cat([part.flatten(0, 1) for part in parts]), whole)


def test_values_may_be_narrower_than_keys() -> None:
    *inputs, grad = _tensors(9, 4, 4, value_dim=6)
    inputs = [x.requires_grad_() for x in inputs]
    _check(_module()(*inputs, packed_seq_params=_params([4, 5])), inputs, [4, 5], grad, True)


@pytest.mark.parametrize(("heads", "groups", "value_dim"), [(4, 4, 8), (4, 2, 8), (4, 1, 6)])
def test_many_short_sequences_on_a_cpu(
    heads: int, groups: int, value_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [*[37] * 7, *[128] * 2]
    *inputs, grad = _tensors(sum(lengths), heads, groups, value_dim=value_dim)
    inputs = [x.requires_grad_() for x in inputs]
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", None)  # not needed for these
    _check(_module()(*inputs, packed_seq_params=_params(lengths)), inputs, lengths, grad, True)


@pytest.mark.parametrize("lengths", [[129] * 2, [32] * 7, [8, 16] * 20])
def test_sequences_that_are_long_or_few_are_left_to_sdpa(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    plain, calls = torch.nn.functional.scaled_dot_product_attention, list[int]()

    def counted(q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        calls.append(q.size(0))
        return plain(q, *args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    *inputs, grad = _tensors(sum(lengths), 2, 1)
    inputs = [x.requires_grad_() for x in inputs]
    _check(_module()(*inputs, packed_seq_params=_params(lengths)), inputs, lengths, grad, True)
    assert sum(calls) == len(lengths)


def test_padded_lengths_win() -> None:
    *inputs, _ = _tensors(12, 4, 2)
    params = _params([5, 3])
    params.cu_seqlens_q_padded = torch.tensor([0, 8, 12], dtype=torch.int32)
    torch.testing.assert_close(
        _module()(*inputs, packed_seq_params=params).double().reshape(12, 4, 8),
        dense_attention(*inputs, [8, 4]),
        atol=2e-6,
        rtol=1e-5,
    )


def test_batch_of_equal_sequences() -> None:
    """sbhd ``[s, b, n, d]``: row b of the batch is one sequence."""
    length, batch = 6, 3
    *inputs, _ = _tensors(length * batch, 4, 2)
    rows = [x.view(batch, length, *x.shape[1:]).transpose(0, 1) for x in inputs]
    out = _module()(*rows)
    assert out.shape == (length, batch, 32)
    expected = dense_attention(*inputs, [length] * batch).view(batch, length, 32).transpose(0, 1)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("cp_size", [2, 3, 4])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 5)])
def test_zigzag_segments_make_up_the_whole(cp_size: int, causal: bool, window: int | None) -> None:
    lengths = [2 * cp_size, 6 * cp_size, 4 * cp_size]
    q, k, v, _ = _tensors(sum(lengths), 4, 2)
    local = [[n // cp_size for n in lengths]] * cp_size
    parts = {
        name: [zigzag(x, lengths, r, cp_size).split(local[r]) for r in range(cp_size)]
        for name, x in zip("qkv", (q, k, v), strict=True)
    }
    outs = []
    for rank in range(cp_size):
        segments: list[Segment] = []
        for i in range(len(lengths)):
            k_parts, v_parts = ([p[i] for p in parts[name]] for name in "kv")
            segments += attention.cp_segments(parts["q"][rank][i], k_parts, v_parts, rank, causal=causal)
        outs.append(attention.attend(segments, causal=causal, scale=8**-0.5, window=window))
    seen = undo_zigzag_pack(outs, lengths)
    expected = dense_attention(q, k, v, lengths, causal=causal, window=window)
    torch.testing.assert_close(seen.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize(
    ("kernel", "shares_heads"), [("flash_attn_varlen_func", True), ("varlen_attn", True), ("varlen_attn", False)]
)
def test_flash_gets_lower_right_aligned_segments(
    kernel: str, shares_heads: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels are CUDA's: a float64 stand-in with their contract shows that we hand them the right lengths."""
    q, k, v, _ = _tensors(10, 4, 2)
    segments = [Segment(q[None, 0:4], k[None, :4], v[None, :4]), Segment(q[None, 4:7], k[None, :7], v[None, :7])]

    def varlen(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, **options: Any) -> torch.Tensor:
        assert (max_q, max_k) == (4, 7)
        if kernel == "varlen_attn":
            inspect.signature(TORCH_VARLEN).bind(q, k, v, cu_q, cu_k, max_q, max_k, **options)
            shared = {"enable_gqa": True} if shares_heads else {}
            assert options == {"scale": 8**-0.5, "window_size": (-1 if window is None else 1, 0), **shared}
            assert k.shape[1] == v.shape[1] == (2 if shares_heads else 4)
        else:
            assert options["causal"]
            assert options["window_size"] == (-1 if window is None else 1, -1)
        out = []
        for i in range(len(cu_q) - 1):
            n, keys = cu_q[i + 1] - cu_q[i], slice(cu_k[i], cu_k[i + 1])
            queries = torch.zeros(cu_k[i + 1] - cu_k[i], *q.shape[1:])
            queries[-n:] = q[cu_q[i] : cu_q[i + 1]]
            out.append(dense_attention(queries, k[keys], v[keys], [len(queries)], window=window)[-n:])
        return torch.cat(out)

    expected = attention.attend(segments, causal=True, scale=8**-0.5, window=window)
    monkeypatch.setattr(attention, kernel, varlen)
    monkeypatch.setattr(attention, "VARLEN_SHARES_HEADS", shares_heads)
    monkeypatch.setattr(attention, "flash_takes", lambda segments, dropout_p: True)
    seen = attention.attend(segments, causal=True, scale=8**-0.5, window=window)
    torch.testing.assert_close(seen.float(), expected)


def test_the_causal_mask_type_is_passed_to_fused_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask of queries x keys would rule out flash attention, and with grouped queries every fused kernel."""
    q, k, v, _ = _tensors(7, 4, 2)
    made: list[tuple[int, ...]] = []

    def noted(*size: int) -> Any:
        made.append(size)
        return causal_lower_right(*size)

    monkeypatch.setattr(attention, "causal_lower_right", noted)
    seen = attention.sdpa_segment(Segment(q[None, 4:], k[None], v[None]), causal=True, scale=8**-0.5)
    assert made == [(3, 7)]
    torch.testing.assert_close(seen.double(), dense_attention(q, k, v, [7])[4:], atol=2e-6, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("value_dim", [64, 32])  # of equal size: torch's varlen kernel; narrower: SDPA
def test_causal_prefixes_on_a_device(value_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers as on a CPU, gradients too, and no memory for queries x keys."""
    monkeypatch.setattr(attention, "flash_attn_varlen_func", None)
    heads, groups, keys, queries = (8, 2, 4096, 2048) if value_dim == 64 else (8, 8, 4096, 2048)
    torch.manual_seed(0)
    whole = [torch.randn(1, keys, n, d) for n, d in ((heads, 64), (groups, 64), (groups, value_dim))]
    host = [x.clone().requires_grad_() for x in whole]
    device = [x.cuda().bfloat16().requires_grad_() for x in whole]
    outs = []
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for q, k, v in (host, device):
        out = attention.attend([Segment(q[:, keys - queries :], k, v)], causal=True, scale=0.125)
        out.float().square().sum().backward()
        outs.append(out.detach().float().cpu())
    assert torch.cuda.max_memory_allocated() - before < heads * queries * keys  # a byte per element of the mask
    torch.testing.assert_close(outs[1], outs[0], atol=2e-2, rtol=2e-2)
    for x, y in zip(host, device, strict=True):
        scale = float(x.grad.abs().max())
        torch.testing.assert_close(y.grad.float().cpu() / scale, x.grad / scale, atol=2e-2, rtol=2e-2)


def test_flash_is_left_alone_for_cpu_and_fp32_tensors() -> None:
    q, k, v, _ = _tensors(4, 4, 2)
    assert not attention.flash_takes([Segment(q[None], k[None], v[None])])


@pytest.mark.parametrize(
    ("config", "flag"),
    [
        ({"qk_clip": True}, "--qk-clip"),
    ],
)
def test_options_without_an_implementation_are_refused(config: dict[str, Any], flag: str) -> None:
    with pytest.raises(ValueError, match=flag):
        _module(**config)


def test_lengths_must_fit_the_tokens() -> None:
    *inputs, _ = _tensors(9, 4, 2)
    with pytest.raises(ValueError, match=r"\[5, 5\] tokens do not fit 9"):
        _module()(*inputs, packed_seq_params=_params([5, 5]))


def test_arbitrary_masks_are_refused() -> None:
    *inputs, _ = _tensors(4, 4, 2)
    with pytest.raises(ValueError, match="causal and unmasked"):
        _module(AttnMaskType.arbitrary)(*inputs, packed_seq_params=_params([4]))

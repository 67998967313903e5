"""Log-probs among recorded masks against a dense log-softmax of masked logits in float64, whole and cut over ranks."""

from __future__ import annotations

import math
import random

import pytest
import torch

from slime.algorithms import log_probs as module
from slime.algorithms.log_probs import TopPMask, top_p_log_probs
from tests.unit.algorithms.thread_group import ThreadGroup, run_ranks


def make_mask(rows: list[list[int]]) -> TopPMask:
    offsets = torch.tensor([0, *torch.tensor([len(row) for row in rows], dtype=torch.long).cumsum(0).tolist()])
    return TopPMask(torch.tensor([i for row in rows for i in row], dtype=torch.long), offsets)


def by_hand(logits: list[list[float]], target: list[int], kept: list[list[int]], temperature: float) -> list[float]:
    """Loops over tokens and kept ids."""
    result = []
    for row, t, ids in zip(logits, target, kept, strict=True):
        scaled = [row[j] / temperature for j in {*ids, t}]
        peak = max(scaled)
        result.append(row[t] / temperature - peak - math.log(sum(math.exp(z - peak) for z in scaled)))
    return result


def masked(logits: torch.Tensor, targets: torch.Tensor, kept: list[list[int]], temperature: float) -> torch.Tensor:
    """The definition: -inf outside of the top-p set, in which the target is always kept."""
    mask = torch.full(logits.shape, -torch.inf, dtype=logits.dtype)
    for i, ids in enumerate(kept):
        mask[i, [*ids, int(targets[i])]] = 0
    return torch.log_softmax(logits / temperature + mask, dim=-1).gather(1, targets[:, None]).squeeze(1)


def random_case(generator: random.Random, rows: int = 5) -> tuple[torch.Tensor, torch.Tensor, list[list[int]], float]:
    vocab = generator.randrange(1, 12)
    values = [[generator.gauss(0, 4) for _ in range(vocab)] for _ in range(rows)]
    targets = [generator.randrange(vocab) for _ in range(rows)]
    kept = [generator.sample(range(vocab), generator.randrange(vocab + 1)) for _ in range(rows)]
    return torch.tensor(values, dtype=torch.float64), torch.tensor(targets), kept, generator.uniform(0.3, 2)


def check_cases(count: int) -> None:
    generator = random.Random(0)
    for _ in range(count):
        logits, targets, kept, temperature = random_case(generator)
        expected = by_hand(logits.tolist(), targets.tolist(), kept, temperature)
        seen, dense = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        actual = top_p_log_probs(seen, targets, make_mask(kept), temperature=temperature)
        assert max(abs(a - e) for a, e in zip(actual.tolist(), expected, strict=True)) < 1e-10
        weights = torch.arange(1.0, 6.0, dtype=torch.float64)
        (actual * weights).sum().backward()
        (masked(dense, targets, kept, temperature) * weights).sum().backward()
        assert seen.grad is not None
        torch.testing.assert_close(seen.grad, dense.grad, rtol=0, atol=1e-10)


def test_equals_the_masked_log_softmax_and_its_gradients() -> None:
    check_cases(60)


@pytest.mark.soak
def test_equals_the_masked_log_softmax_in_a_thousand_cases() -> None:
    check_cases(1000)


def test_gradcheck() -> None:
    generator = random.Random(1)
    for _ in range(5):
        logits, targets, kept, temperature = random_case(generator, rows=3)
        masks = make_mask(kept)
        assert torch.autograd.gradcheck(
            lambda z, t=targets, n=masks, s=temperature: top_p_log_probs(z, t, n, temperature=s),
            logits.requires_grad_(),
        )


def test_capped_logits() -> None:
    """``cap * tanh(z / cap)`` in the place of ``z``, by plain autograd."""
    generator = random.Random(3)
    for cap in (1.0, 30.0):
        logits, targets, kept, temperature = random_case(generator)
        seen, dense = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        actual = top_p_log_probs(seen, targets, make_mask(kept), temperature=temperature, cap=cap)
        expected = masked(cap * torch.tanh(dense / cap), targets, kept, temperature)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
        actual.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(seen.grad, dense.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3])
def test_a_vocabulary_cut_over_ranks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a rank holds neither the target nor any of the kept tokens."""

    def gather(stats: torch.Tensor, group: ThreadGroup | None) -> torch.Tensor:
        return stats.unsqueeze(1) if group is None else torch.stack(group.exchange(stats), dim=1)

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 6 * size, generator=generator, dtype=torch.float64) * 3
    targets = torch.randint(6 * size, (9,), generator=generator)
    kept = [torch.randperm(6 * size, generator=generator)[:k].tolist() for k in range(9)]
    weights = torch.randn(9, generator=generator, dtype=torch.float64)
    dense = logits.clone().requires_grad_()
    expected = masked(dense, targets, kept, 0.7)
    (expected * weights).sum().backward()
    assert dense.grad is not None
    monkeypatch.setattr(module, "gather_ranks", gather)

    def rank(group: ThreadGroup) -> tuple[torch.Tensor, torch.Tensor]:
        part = logits[:, group.rank() * 6 : group.rank() * 6 + 6].clone().requires_grad_()
        log_probs = top_p_log_probs(part, targets, make_mask(kept), tp_group=group, temperature=0.7)  # type: ignore[arg-type]
        (log_probs * weights).sum().backward()
        assert part.grad is not None
        return log_probs.detach(), part.grad

    results = run_ranks(size, rank)
    for log_probs, _ in results:
        torch.testing.assert_close(log_probs, expected.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat([grad for _, grad in results], dim=1), dense.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("entries", [1, 7, 1000])
def test_rows_are_selected_and_taken_in_pieces(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_ENTRIES", entries)
    generator = random.Random(2)
    logits, targets, kept, temperature = random_case(generator, rows=11)
    rows = torch.tensor([7, 0, 10, 3])
    some = [kept[i] for i in rows.tolist()]
    seen, dense = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    actual = top_p_log_probs(seen, targets[rows], make_mask(some), rows=rows, temperature=temperature)
    expected = masked(dense, targets, kept, temperature)[rows]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    actual.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(seen.grad, dense.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_logits(dtype: torch.dtype) -> None:
    logits, targets, kept, _ = random_case(random.Random(3), rows=40)
    seen = logits.to(dtype).requires_grad_()
    dense = logits.to(dtype).double().requires_grad_()
    actual = top_p_log_probs(seen, targets, make_mask(kept))
    assert actual.dtype == torch.float32
    expected = masked(dense, targets, kept, 1.0)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-5)
    actual.sum().backward()
    expected.sum().backward()
    assert seen.grad is not None
    assert dense.grad is not None
    assert seen.grad.dtype == dtype
    torch.testing.assert_close(seen.grad.double(), dense.grad, rtol=1e-2, atol=1e-5)


def test_nothing_to_do_and_nothing_but_the_target() -> None:
    logits = torch.randn(2, 5, requires_grad=True)
    none = top_p_log_probs(logits, torch.empty(0, dtype=torch.long), make_mask([]), rows=torch.empty(0).long())
    assert none.shape == (0,)
    alone = top_p_log_probs(logits, torch.tensor([1, 4]), make_mask([[], [4]]))
    assert alone.tolist() == [0.0, 0.0]
    alone.sum().backward()
    assert logits.grad is not None
    assert not logits.grad.any()


def test_shapes_must_fit() -> None:
    with pytest.raises(ValueError, match="and 1 for 2 rows"):
        top_p_log_probs(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long), make_mask([[0]]))
    with pytest.raises(ValueError, match="temperature must be positive"):
        top_p_log_probs(torch.zeros(1, 3), torch.zeros(1, dtype=torch.long), make_mask([[0]]), temperature=0)


@pytest.mark.gpu
def test_on_a_device_nothing_but_the_gradient_is_as_large_as_the_vocabulary() -> None:
    rows, vocab, size = 2048, 151_936, 20
    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(rows, vocab, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
    targets = torch.randint(vocab, (rows,), device="cuda", generator=generator)
    ids = torch.randint(vocab // size, (rows, size), device="cuda", generator=generator)
    ids += torch.arange(size, device="cuda") * (vocab // size)  # distinct
    masks = TopPMask(ids.flatten(), torch.arange(0, rows * size + 1, size, device="cuda"))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    log_probs = top_p_log_probs(logits, targets, masks)
    log_probs.sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < logits.numel() * 2 + 64 * 2**20  # the bf16 gradient, and what belongs to the entries
    few = slice(0, 64)
    kept = [row.tolist() for row in ids[few].cpu()]
    dense = logits[few].detach().double().cpu().requires_grad_()
    expected = masked(dense, targets[few].cpu(), kept, 1.0)
    torch.testing.assert_close(log_probs[few].double().cpu(), expected, rtol=0, atol=1e-5)
    expected.sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad[few].double().cpu(), dense.grad, rtol=1e-2, atol=1e-4)

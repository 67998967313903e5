"""Log-probs and entropy against a dense log-softmax in float64, whole and cut over two simulated ranks."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from slime.algorithms import log_probs as module
from slime.algorithms.log_probs import Vocabulary, default_chunk_size, log_probs_and_entropy
from tests.unit.algorithms.thread_group import ThreadGroup, run_ranks


def dense(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0, cap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = logits.double() if cap is None else cap * torch.tanh(logits.double() / cap)
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0)).sum(-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), entropy


@pytest.fixture
def thread_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(stats: torch.Tensor, group: ThreadGroup | None) -> torch.Tensor:
        return stats.unsqueeze(1) if group is None else torch.stack(group.exchange(stats), dim=1)

    monkeypatch.setattr(module, "gather_ranks", gather)


def random_case(rows: int = 13, vocab: int = 22, scale: float = 4.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + vocab)
    logits = torch.randn(rows, vocab, generator=generator, dtype=torch.float64) * scale
    return logits, torch.randint(vocab, (rows,), generator=generator)


@pytest.mark.parametrize("chunk_size", [-1, 1, 4, 13, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("cap", [None, 30.0, 3.0])
def test_equals_dense_log_softmax_and_its_gradients(chunk_size: int, temperature: float, cap: float | None) -> None:
    logits, targets = random_case()
    expected_in, actual_in = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    expected = dense(expected_in, targets, temperature, cap)
    actual = log_probs_and_entropy(
        actual_in,
        targets,
        chunk_size=chunk_size,
        with_entropy=True,
        temperature=temperature,
        entropy_grad=True,
        cap=cap,
    )
    weights = torch.randn(2, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    for pair in (expected, actual):
        (pair[0] * weights[0] + pair[1] * weights[1]).sum().backward()
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e.detach(), rtol=0, atol=1e-12, check_dtype=True)
    torch.testing.assert_close(actual_in.grad, expected_in.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_logits_give_float32_results_and_gradients_in_their_own_dtype(dtype: torch.dtype) -> None:
    logits, targets = random_case(40, 300)
    actual_in = logits.to(dtype).requires_grad_()
    expected_in = logits.to(dtype).double().requires_grad_()  # the same rounded numbers
    log_probs, entropy = log_probs_and_entropy(actual_in, targets, chunk_size=16, with_entropy=True, entropy_grad=True)
    expected = dense(expected_in, targets)
    assert log_probs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(log_probs.double(), expected[0].detach(), rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected[1].detach(), rtol=0, atol=1e-5)
    (log_probs.sum() + entropy.sum()).backward()
    (expected[0].sum() + expected[1].sum()).backward()
    assert actual_in.grad.dtype == dtype
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual_in.grad.double(), expected_in.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("cap", [None, 2.0])
def test_gradcheck(cap: float | None) -> None:
    logits, targets = random_case(4, 5, scale=1.0)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return log_probs_and_entropy(
            x, targets, chunk_size=3, with_entropy=True, temperature=0.8, entropy_grad=True, vocab_size=5, cap=cap
        )

    assert torch.autograd.gradcheck(function, logits.requires_grad_())


def test_entropy_is_detached_unless_asked_for() -> None:
    logits, targets = random_case()
    logits.requires_grad_()
    log_probs, entropy = log_probs_and_entropy(logits, targets, with_entropy=True)
    assert log_probs.requires_grad
    assert not entropy.requires_grad
    assert log_probs_and_entropy(logits, targets)[1] is None


def test_rows_select_without_indexing_before_and_leave_zero_gradient_elsewhere() -> None:
    logits, _ = random_case(9, 6)
    rows, targets = torch.tensor([7, 2, 3]), torch.tensor([5, 0, 1])
    expected_in, actual_in = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    expected = dense(expected_in[rows], targets)[0]
    actual, _ = log_probs_and_entropy(actual_in, targets, rows=rows, chunk_size=2)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    expected.sum().backward()
    actual.sum().backward()
    torch.testing.assert_close(actual_in.grad, expected_in.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("selected", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_gradient_can_take_the_place_of_the_logits(dtype: torch.dtype, selected: bool, cap: float | None) -> None:
    leaf, targets = random_case(40, 300)
    rows = torch.randperm(40, generator=torch.Generator().manual_seed(1))[:25] if selected else None
    gradients, places = [], []
    for overwrite in (False, True):
        logits = leaf.to(dtype).requires_grad_() * 1.0  # as a layer's output would be: not a leaf
        logits.register_hook(lambda grad: (gradients.append(grad.clone()), places.append(grad.data_ptr()))[0])
        log_probs, entropy = log_probs_and_entropy(
            logits, targets if rows is None else targets[rows], rows=rows, chunk_size=7, temperature=0.7,
            with_entropy=True, entropy_grad=True, vocab_size=297, overwrite_logits=overwrite, cap=cap,
        )  # fmt: skip
        (log_probs.exp().sum() + entropy.sum()).backward()
        assert (places[-1] == logits.data_ptr()) is overwrite
    assert gradients[0].any()
    assert torch.equal(gradients[0], gradients[1])


def test_logits_that_another_operation_needs_are_not_overwritten_in_silence() -> None:
    leaf, targets = random_case()
    logits = leaf.requires_grad_() * 1.0
    squares = logits.square()  # keeps the logits for its backward, which comes second
    log_probs, _ = log_probs_and_entropy(logits, targets, overwrite_logits=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (log_probs.sum() + squares.sum()).backward()
    log_probs, _ = log_probs_and_entropy(leaf * 1.0, targets, overwrite_logits=True)
    log_probs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        log_probs.sum().backward()


def test_logits_whose_rows_share_memory_are_not_overwritten() -> None:
    row = torch.randn(1, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([5, 0, 1])
    log_probs, _ = log_probs_and_entropy(row.expand(3, 6), targets, overwrite_logits=True)
    (actual,) = torch.autograd.grad(log_probs.sum(), row)
    (expected,) = torch.autograd.grad(dense(row.expand(3, 6), targets)[0].sum(), row)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_vocabulary_padding_counts_for_nothing() -> None:
    logits, targets = random_case(5, 8)
    targets = targets % 6
    padded = logits.clone()
    padded[:, 6:] = 50.0  # would swallow all probability
    padded.requires_grad_()
    log_probs, entropy = log_probs_and_entropy(padded, targets, vocab_size=6, with_entropy=True, entropy_grad=True)
    expected = dense(logits[:, :6], targets)
    torch.testing.assert_close(log_probs, expected[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, expected[1], rtol=0, atol=1e-12)
    (log_probs + entropy).sum().backward()
    assert (padded.grad[:, 6:] == 0).all()


@pytest.mark.usefixtures("thread_gather")
@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("size", [2, 4])
def test_vocabulary_parallel_ranks_agree_with_the_whole(size: int, cap: float | None) -> None:
    vocab, width = 22, 8 if size == 4 else 12  # real vocabulary, columns per rank: the last ranks hold padding
    logits, targets = random_case(13, vocab)
    expected_in = logits.clone().requires_grad_()
    expected = dense(expected_in, targets, 1.3, cap)
    weights = torch.randn(2, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    (expected[0] * weights[0] + expected[1] * weights[1]).sum().backward()
    padded = torch.nn.functional.pad(logits, (0, size * width - vocab), value=9.0)

    def rank(group: ThreadGroup) -> tuple[torch.Tensor, ...]:
        part = padded[:, group.rank() * width :][:, :width].clone().requires_grad_()
        log_probs, entropy = log_probs_and_entropy(
            part, targets, tp_group=group, vocab_size=vocab, chunk_size=5, with_entropy=True, temperature=1.3,
            entropy_grad=True, cap=cap,
        )  # fmt: skip
        (log_probs * weights[0] + entropy * weights[1]).sum().backward()
        return log_probs.detach(), entropy.detach(), part.grad

    results = run_ranks(size, rank)
    for log_probs, entropy, _ in results:
        torch.testing.assert_close(log_probs, expected[0].detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(entropy, expected[1].detach(), rtol=0, atol=1e-12)
    grad = torch.cat([result[2] for result in results], dim=1)
    torch.testing.assert_close(grad[:, :vocab], expected_in.grad, rtol=0, atol=1e-12)
    assert (grad[:, vocab:] == 0).all()


def test_masked_logits_have_probability_zero() -> None:
    logits, targets = random_case(4, 6)
    logits[:, 3] = -torch.inf
    targets = targets % 3
    expected_in, actual_in = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    expected = dense(expected_in, targets)
    actual = log_probs_and_entropy(actual_in, targets, with_entropy=True, entropy_grad=True)
    torch.testing.assert_close(actual, tuple(e.detach() for e in expected), rtol=0, atol=1e-12)
    (actual[0] + actual[1]).sum().backward()
    assert torch.isfinite(actual_in.grad).all()
    assert (actual_in.grad[:, 3] == 0).all()


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4], [0.0, 0.0, 0.0]], requires_grad=True)
    log_probs, entropy = log_probs_and_entropy(logits, torch.tensor([1, 2]), with_entropy=True, entropy_grad=True)
    torch.testing.assert_close(log_probs, torch.tensor([-1e4, -1.0986123]))
    torch.testing.assert_close(entropy, torch.tensor([0.0, 1.0986123]))
    (log_probs + entropy).sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-1.0, 1.0, 0.0], [-1 / 3, -1 / 3, 2 / 3]]))


def test_entropy_keeps_its_digits_far_from_zero() -> None:
    logits, targets = random_case(5, 40, scale=0.5)
    near, far = (
        log_probs_and_entropy((logits + shift).float(), targets, with_entropy=True)[1] for shift in (0.0, 300.0)
    )
    expected = dense((logits + 300).float(), targets)[1]
    torch.testing.assert_close(far.double(), expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(near, far, rtol=0, atol=1e-4)  # the logits themselves are rounded


def test_no_rows_keeps_the_graph() -> None:
    logits = torch.randn(0, 7, requires_grad=True)
    log_probs, entropy = log_probs_and_entropy(logits, torch.empty(0, dtype=torch.long), with_entropy=True)
    assert log_probs.shape == entropy.shape == (0,)
    log_probs.sum().backward()
    assert logits.grad.shape == (0, 7)


def test_target_outside_of_the_vocabulary_is_minus_infinity() -> None:
    log_probs, _ = log_probs_and_entropy(torch.zeros(1, 4), torch.tensor([4]))
    assert log_probs.item() == -torch.inf


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"logits": torch.zeros(3, 4), "targets": torch.zeros(2, dtype=torch.long)}, r"got \(3, 4\) and \(2,\)"),
        ({"logits": torch.zeros(2, 1, 4), "targets": torch.zeros(2, dtype=torch.long)}, "expected logits"),
        ({"logits": torch.zeros(2, 4), "targets": torch.zeros(2, dtype=torch.long), "temperature": 0.0}, "positive"),
    ],
)
def test_refuses_what_does_not_fit(kwargs: dict, match: str) -> None:
    logits, targets = kwargs.pop("logits"), kwargs.pop("targets")
    with pytest.raises(ValueError, match=match):
        log_probs_and_entropy(logits, targets, **kwargs)


class _PeakBytes(torch.utils._python_dispatch.TorchDispatchMode):
    """Largest number of bytes that results of operations held together, those made before left out."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {t.untyped_storage()._cdata for t in torch.utils._pytree.tree_leaves(args) if torch.is_tensor(t)}
        for t in torch.utils._pytree.tree_leaves(result):
            if torch.is_tensor(t) and t.untyped_storage()._cdata not in known:
                storage = t.untyped_storage()
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result


@pytest.mark.parametrize(("selected", "cap"), [(False, None), (True, None), (True, 30.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_beyond_the_gradient_is_one_and_a_half_chunks(
    dtype: torch.dtype, selected: bool, cap: float | None
) -> None:
    rows, vocab, chunk = 64, 5000, 16
    logits = torch.randn(rows, vocab, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocab, (rows,))
    limit = 1.5 * chunk * vocab * 4 + 40 * rows * 8  # and a few numbers per row
    with _PeakBytes() as forward:
        log_probs, entropy = log_probs_and_entropy(
            logits, targets, rows=torch.arange(rows) if selected else None, chunk_size=chunk, with_entropy=True,
            temperature=0.9, entropy_grad=True, cap=cap,
        )  # fmt: skip
    with _PeakBytes() as backward:
        torch.autograd.grad((log_probs + entropy).sum(), logits)
    assert (chunk * vocab * 4 if cap is None else 0) < forward.peak <= limit  # a cap has a third buffer, in backward
    assert logits.nbytes < backward.peak <= logits.nbytes + limit


@pytest.mark.parametrize("selected", [False, True])
def test_overwriting_needs_no_memory_for_the_gradient(selected: bool) -> None:
    rows, vocab, chunk = 64, 5000, 16
    leaf = torch.randn(rows, vocab, requires_grad=True)
    logits, targets = leaf * 1.0, torch.randint(vocab, (rows,))
    log_probs, _ = log_probs_and_entropy(
        logits, targets, rows=torch.arange(rows) if selected else None, chunk_size=chunk, overwrite_logits=True
    )
    with _PeakBytes() as backward:
        torch.autograd.grad(log_probs.sum(), logits)
    assert backward.peak <= 1.5 * chunk * vocab * 4 + 40 * rows * 8 < logits.nbytes


def test_default_chunk_keeps_to_its_budget() -> None:
    assert default_chunk_size(151_936, torch.device("cpu")) * 151_936 <= 2**20
    assert default_chunk_size(2**30, torch.device("cpu")) == 1


def test_draws_are_distributed_as_the_model_says() -> None:
    """10,000 draws from each of two rows, against the probabilities (chi-squared, 0.1 %); padding is never drawn."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 12, generator=generator) * 2
    logits[:, 10:] = 50.0  # padding
    logits[2, 4] = -torch.inf
    vocabulary, rows = Vocabulary(0, 10, 0.7), torch.tensor([0, 2])
    numbers = torch.rand(2, 10_000, dtype=torch.float64, generator=generator)
    ids, log_probs = vocabulary.sample(logits, rows, numbers, 1)
    expected = (logits[rows, :10] / 0.7).log_softmax(-1)
    torch.testing.assert_close(log_probs, expected.gather(1, ids))
    counts = torch.stack([row.bincount(minlength=12) for row in ids]).double()
    assert counts[:, 10:].sum() == 0
    assert counts[1, 4] == 0
    wanted = expected.double().exp() * 10_000
    kept = wanted > 0
    statistic = ((counts[:, :10] - wanted) ** 2 / wanted.clamp_min(1e-300))[kept].sum()
    assert statistic < 42.3  # 9 + 8 degrees of freedom


def test_the_ends_of_the_unit_interval_draw_tokens_that_exist() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]])
    numbers = torch.tensor([[0.0, 0.25, 0.5, 1.0 - 2**-53, 1.0]], dtype=torch.float64)
    ids, _ = Vocabulary(0, 4, 1.0).sample(logits, torch.tensor([0]), numbers, 8)
    assert ids.tolist() == [[1, 1, 2, 2, 2]]


def test_labels_and_draws_are_those_of_capped_logits() -> None:
    generator = torch.Generator().manual_seed(1)
    logits, cap, temperature = torch.randn(4, 9, generator=generator) * 8, 3.0, 0.7
    expected = (cap * torch.tanh(logits / cap) / temperature).log_softmax(-1)
    vocabulary, rows = Vocabulary(0, 9, temperature, cap=cap), torch.arange(4)
    labels = torch.arange(9).expand(4, 9)
    torch.testing.assert_close(vocabulary.log_probs(logits, rows, labels, 3), expected)
    numbers = torch.rand(4, 5, dtype=torch.float64, generator=generator)
    ids, log_probs = vocabulary.sample(logits, rows, numbers, 3)
    torch.testing.assert_close(log_probs, expected.gather(1, ids))
    assert ids.equal(torch.searchsorted(expected.double().exp().cumsum(1), numbers, right=True))

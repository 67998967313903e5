"""Sampling by inversion draws from the given distribution, and refuses what is none."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d

from tests.support.engine_plugin import engine_plugin


class Sampler:
    """The part of SGLang's class that the hooks use."""

    enable_deterministic = use_ascend_backend = False
    rl_on_policy_target = None

    def __init__(self) -> None:
        self.output_logprob_processor = self
        self.whole_matrices = 0

    def compute_logprobs(self, log_probs: torch.Tensor, nums: list[int], ids: list[Any], drawn: torch.Tensor) -> Any:
        def write_output_to(output: Any) -> None:
            output.next_token_logprobs = log_probs[torch.arange(len(drawn)), drawn]

        return SimpleNamespace(write_output_to=write_output_to)


@pytest.fixture
def sampler() -> Iterator[ModuleType]:
    with engine_plugin({"layers.sampler": {"Sampler": Sampler, "SGLANG_RETURN_ORIGINAL_LOGPROB": False}}) as load:
        yield load("cpu.sampler")


@pytest.fixture
def sample(sampler: ModuleType) -> Any:
    def never(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError("SGLang's own sampler was called")

    return lambda probs, original=never, **kwargs: sampler.sample(original, probs, **kwargs)


def chi_squared(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Of the entries that are expected at least 5 times, in standard deviations from the mean of the statistic."""
    expected = probs.double() * counts.sum()
    enough = expected >= 5
    statistic = ((counts[enough] - expected[enough]) ** 2 / expected[enough]).sum().item()
    freedom = int(enough.sum()) - 1
    return (statistic - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize("vocabulary", [3, 512, 4096, 4097, 151_936])
def test_frequencies_are_the_probabilities(sample, vocabulary: int) -> None:
    torch.manual_seed(vocabulary)
    probs = torch.softmax(5 * torch.randn(vocabulary), dim=0)
    rounds = 10 if vocabulary > 1000 else 150
    draws = [sample(probs.expand(64, -1).contiguous(), sampling_seed=None, positions=None) for _ in range(rounds)]
    drawn = torch.cat(draws)
    assert drawn.dtype == torch.int32
    counts = torch.bincount(drawn.long(), minlength=vocabulary).double()
    assert abs(chi_squared(counts, probs)) < 5


def test_rows_are_drawn_from_their_own_distribution(sample) -> None:
    torch.manual_seed(0)
    probs = torch.eye(50)[torch.randperm(50)]
    for _ in range(20):
        assert torch.equal(sample(probs).long(), probs.argmax(dim=-1))


@pytest.mark.parametrize("vocabulary", [1000, 4096])
def test_what_has_no_probability_is_never_drawn(sample, vocabulary: int) -> None:
    torch.manual_seed(1)
    probs = torch.rand(64, vocabulary)
    probs[torch.rand_like(probs) < 0.9] = 0
    probs[:, -1] = 0
    probs /= probs.sum(dim=-1, keepdim=True)
    for _ in range(50):
        assert (probs.gather(1, sample(probs).long()[:, None]) > 0).all()


def test_a_number_that_is_rounded_up_to_one_still_draws_something_possible(sample, monkeypatch) -> None:
    monkeypatch.setattr(torch, "rand_like", torch.ones_like)
    probs = torch.tensor([[0.25, 0.75, 0.0]])
    assert sample(probs).tolist() == [1]


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_blocks_at_both_ends_of_a_row_draw_something_possible(sample, monkeypatch, value: float) -> None:
    monkeypatch.setattr(torch, "rand_like", lambda like: torch.full_like(like, value))
    probs = torch.zeros(64, 2048)
    probs[:, [70, 75, 1000, 1500]] = torch.tensor([0.1, 0.2, 0.2, 0.5])
    assert sample(probs).tolist() == [1500 if value else 70] * 64


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
def test_rows_that_are_no_distribution_are_an_error(sample, bad: float) -> None:
    with pytest.raises(RuntimeError, match="not finite, or all zero"):
        sample(torch.stack([torch.full((4,), 0.25), torch.full((4,), bad)]))


def test_seeded_requests_are_drawn_by_sglang(sample) -> None:
    seeds = torch.tensor([1])
    drawn = sample(torch.ones(1, 4) / 4, original=lambda probs, **kw: kw["sampling_seed"], sampling_seed=seeds)
    assert drawn is seeds


def stock_filtered(probs, top_ks, top_ps, min_ps, need_min_p_sampling, *_rest, return_filtered_probs=False) -> Any:
    """SGLang's function, without seeds."""
    weights, ids = probs.sort(dim=-1, descending=True)
    cumulative = weights.cumsum(dim=-1)
    weights[torch.arange(probs.shape[-1])[None] >= top_ks[:, None]] = 0.0
    weights[(cumulative - weights) > top_ps[:, None]] = 0.0
    if need_min_p_sampling:
        weights[weights < (weights[:, 0] * min_ps)[:, None]] = 0.0
    drawn = torch.multinomial(weights, num_samples=1)
    ids = ids.to(torch.int32)
    token = ids.gather(1, drawn)[:, 0]
    return (token, weights, ids, weights.gather(1, drawn)[:, 0]) if return_filtered_probs else token


FILTERS = [  # top-k, top-p, min-p, how many entries SGLang's function gets
    ([5, 200], [1.0, 0.9], None, 256),
    ([1 << 30, 1 << 30], [0.9, 0.5], None, 256),
    ([1 << 30, 1 << 30], [0.9, 0.5], [0.1, 0.3], 256),
    ([1, 2000], [1.0, 1.0], [0.2, 0.0], 2048),
    ([1, 1 << 30], [1.0, 1.0], None, 9000),
    ([9000, 9000], [0.9, 0.99999], None, 9000),
]


@pytest.mark.parametrize(("top_k", "top_p", "min_p", "entries"), FILTERS)
def test_filters_keep_their_masks_without_a_whole_sort(sampler, top_k, top_p, min_p, entries: int) -> None:
    torch.manual_seed(0)
    probs = torch.softmax(torch.randn(2, 9000) * torch.tensor([[8.0], [3.0]]), dim=-1)
    widths = []

    def original(given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        widths.append(given.shape[-1])
        return stock_filtered(given, *args, **kwargs)

    asked = (torch.tensor(top_k), torch.tensor(top_p), torch.tensor(min_p or [0.0] * 2), min_p is not None, None, None)
    expected = stock_filtered(probs, *asked, return_filtered_probs=True)
    token, weights, ids, weight = sampler.sample_filtered(original, probs, *asked, return_filtered_probs=True)
    assert widths == [entries]
    for row in range(2):
        mask, wanted = (i[row][w[row] > 0].tolist() for w, i in ((weights, ids), (expected[1], expected[2])))
        assert mask == wanted
        assert int(token[row]) in mask
        assert weight[row] == probs[row, token[row]]
    counts = torch.zeros(9000)
    for _ in range(200):
        drawn = sampler.sample_filtered(original, probs, *asked)
        assert drawn.dtype == torch.int32
        counts[drawn[1]] += 1
    kept = torch.zeros(9000).scatter(0, expected[2][1].long(), expected[1][1])
    assert abs(chi_squared(counts.double(), kept / kept.sum())) < 5


def test_too_few_are_not_tried_in_every_step(sampler) -> None:
    probs, top_k = torch.ones(1, 1024) / 1024, torch.tensor([2000])
    peaked = torch.softmax(torch.arange(1024.0)[None], dim=-1)
    widths = []

    def step(probs: torch.Tensor) -> int:
        def original(given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            widths.append(given.shape[-1])
            return torch.zeros(1, dtype=torch.int32)

        sampler.sample_filtered(original, probs, top_k, torch.tensor([0.9]), torch.zeros(1), False, None, None)
        return widths[-1]

    assert step(probs) == 1024
    assert [step(peaked) for _ in range(sampler.RETRY_AFTER + 1)] == [1024] * sampler.RETRY_AFTER + [256]
    assert step(peaked) == 256


def test_seeded_requests_are_filtered_by_sglang(sampler) -> None:
    probs, one = torch.ones(1, 9000) / 9000, torch.ones(1)
    asked = (one.long(), one, one, False, torch.tensor([3]), one)
    assert sampler.sample_filtered(lambda given, *args, **kw: given, probs, *asked) is probs


def stock_forward(sampler: ModuleType, top_k: bool) -> Any:
    """Of a Sampler: log-probs are those of the whole distribution, whatever it draws from."""

    def draw(_self: Sampler, probs: torch.Tensor, *args: Any) -> torch.Tensor:
        return probs.argmax(dim=-1) if top_k else sampler.sample(None, probs)

    def forward(
        self: Sampler, output: Any, info: Any, return_logprob: bool, nums: list[int], ids: list[Any], positions: Any
    ) -> torch.Tensor:
        probs = torch.softmax(output.next_token_logits, dim=-1)
        drawn = sampler.remember_probs(draw, self, probs, info, positions, not top_k)
        if return_logprob:
            self.whole_matrices += 1
            self.compute_logprobs(torch.log(probs), nums, ids, drawn).write_output_to(output)
        return drawn

    return forward


@pytest.mark.parametrize("top_k", [False, True])
@pytest.mark.parametrize(
    ("nums", "ids", "greedy", "whole"),
    [
        ([0, 0, 0], [None, None, None], False, False),
        ([0, 5, 0], [None, None, None], False, True),
        ([0, 0, 0], [None, [3], None], False, True),
        ([0, 0, 0], [None, None, None], True, True),
    ],
)
def test_log_probs_of_drawn_tokens_need_no_others(sampler, nums, ids, greedy: bool, whole: bool, top_k: bool) -> None:
    torch.manual_seed(0)
    mine, output = Sampler(), SimpleNamespace(next_token_logits=4 * torch.randn(3, 50))
    asked = (output, SimpleNamespace(is_all_greedy=greedy), True, nums, ids, torch.zeros(3))
    drawn = sampler.forward(stock_forward(sampler, top_k), mine, *asked)
    expected = torch.log_softmax(output.next_token_logits, dim=-1)[torch.arange(3), drawn.long()]
    assert torch.allclose(output.next_token_logprobs, expected, rtol=0, atol=1e-6)
    assert mine.whole_matrices == whole


@pytest.mark.parametrize("field", ["enable_deterministic", "rl_on_policy_target", "use_ascend_backend"])
def test_other_ways_to_compute_log_probs_stay_with_sglang(sampler, field: str) -> None:
    mine, output = Sampler(), SimpleNamespace(next_token_logits=torch.randn(1, 5))
    setattr(mine, field, True)
    info = SimpleNamespace(is_all_greedy=False)
    sampler.forward(stock_forward(sampler, False), mine, output, info, True, [0], [None], torch.zeros(1))
    assert mine.whole_matrices == 1


def test_no_probabilities_are_kept(sampler) -> None:
    mine, output = Sampler(), SimpleNamespace(next_token_logits=torch.randn(1, 5))
    info = SimpleNamespace(is_all_greedy=False)
    for return_logprob in (True, False):
        forward = stock_forward(sampler, False)
        sampler.forward(forward, mine, output, info, return_logprob, [0], [None], torch.zeros(1))
    assert sampler._WANTED == []


def test_another_sglang_is_noticed(sampler) -> None:
    points = importlib.import_module("slime_engine_plugin.hook_points")
    points.require("os.path.relpath", "path start")
    points.require("fractions.Fraction", "numerator")
    for target, parameters in (("os.path.relpath", "path"), ("os.path.nothing", "path"), ("no_such_package.x", "a")):
        with pytest.raises(points.OtherSGLangError, match=target):
            points.require(target, parameters)
    with pytest.raises(points.OtherSGLangError, match="takes"):
        points.require("fractions.Fraction", "numerator sign")


def test_what_does_not_fit_is_left_to_sglang_with_one_line_each(sampler, caplog, monkeypatch) -> None:
    plugin = importlib.import_module("slime_engine_plugin")
    monkeypatch.setattr(distributed_c10d, "ProcessGroupGloo", distributed_c10d.ProcessGroupGloo)  # put back afterwards
    plugin.register_faster_on_cpu()  # none fits the stand-in above, but for what is torch's
    assert [record.args[0] for record in caplog.records] == [m for m in plugin.FASTER_ON_CPU if m != "cpu.gloo"]
    assert distributed_c10d.ProcessGroupGloo.shares_device
    assert all("SGLang's own is used" in record.getMessage() for record in caplog.records)

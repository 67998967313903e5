"""Every formula of ``slime.algorithms`` against its loop, on random cases: what to compute, and how far off it is.

python -m tests.unit.algorithms.proofs [CASES]      prints the table of the largest errors
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from slime.algorithms import advantages, kl, log_probs, losses, mis, mismatch, reducers, rewards
from slime.algorithms.advantages import discounted_suffix_sums
from slime.algorithms.losses import compute_value_loss
from slime.algorithms.trained_tokens import TrainedTokens
from slime.algorithms.whitening import masked_whiten
from tests.unit.algorithms import brute_force

Numbers = Any
Proof = Callable[[random.Random], tuple[Numbers, Numbers]]
"""One random case: what slime computes and what the loop does, as nested lists of floats or tensors."""

LIMIT = 1e-10


def largest_error(proof: Proof, cases: int, seed: int = 0) -> float:
    """Return the largest absolute difference over ``cases`` cases. A NaN or another number of values is infinite."""
    rng, worst = random.Random(seed), 0.0
    for _ in range(cases):
        actual, expected = (_flat(numbers) for numbers in proof(rng))
        if len(actual) != len(expected):
            return float("inf")
        for a, e in zip(actual, expected, strict=True):
            error = abs(a - e)
            worst = max(worst, error if error == error else float("inf"))
    return worst


def _flat(numbers: Numbers) -> list[float]:
    if isinstance(numbers, Tensor):
        return numbers.reshape(-1).tolist()
    if isinstance(numbers, (list, tuple)):
        return [value for part in numbers for value in _flat(part)]
    return [float(numbers)]


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def normal(rng: random.Random, count: int) -> list[float]:
    scale = 10 ** rng.uniform(-3, 0.3)
    return [rng.gauss(0, scale) for _ in range(count)]


def bits(rng: random.Random, count: int) -> list[int]:
    chance = rng.choice([0.0, 0.5, 0.8, 1.0])
    return [int(rng.random() < chance) for _ in range(count)]


def lengths(rng: random.Random, most: int = 12) -> list[int]:
    """Response lengths of a batch; empty ones are among them."""
    return [rng.randint(0, most) for _ in range(rng.randint(1, 5))]


def kl_of(kind: str, unbiased: bool) -> Proof:
    def proof(rng: random.Random) -> tuple[Numbers, Numbers]:
        n = rng.randint(0, 12)
        p, base, old = normal(rng, n), normal(rng, n), normal(rng, n)
        ratio = torch.exp(tensor(p) - tensor(old)) if unbiased else None
        weights = ratio.tolist() if ratio is not None else [1.0] * n
        return kl.compute_approx_kl(tensor(p), tensor(base), kind, ratio), [
            brute_force.kl(*row[:2], kind, row[2]) for row in zip(p, base, weights, strict=True)
        ]

    return proof


def grpo(rng: random.Random) -> tuple[Numbers, Numbers]:
    n, std = rng.randint(1, 20), rng.random() < 0.5
    # multiples of 1/8 are exact, so that equal rewards are equal in whatever order they are summed
    values, groups = [round(8 * rng.gauss(0, 2)) / 8 for _ in range(n)], [rng.randint(0, 5) for _ in range(n)]
    normalized = rewards.normalize_by_group(values, groups, divide_by_std=std)
    counts = lengths(rng)[:n]
    spread = advantages.get_grpo_returns(normalized[: len(counts)], [tensor([0.0] * c) for c in counts])
    expected = brute_force.grpo(values, groups, std)
    return [normalized, spread], [expected, [[r] * c for r, c in zip(expected, counts, strict=False)]]


def rloo(rng: random.Random) -> tuple[Numbers, Numbers]:
    n = rng.randint(1, 12)
    values, sums = normal(rng, n), normal(rng, n)
    groups = [rng.randint(0, 3) for _ in range(n)]
    trajectories = [rng.choice([None, 0, 1, 2]) for _ in range(n)]
    coef, counts = rng.random(), [rng.randint(0, 4) for _ in range(n)]
    left_out, centered = (rewards.leave_one_out(column, groups, trajectories) for column in (values, sums))
    result = advantages.get_rloo_advantages(left_out, [tensor([0.0] * c) for c in counts], centered, coef)
    whole = brute_force.rloo([r - coef * k for r, k in zip(values, sums, strict=True)], groups, trajectories)
    return result, [[a] * c for a, c in zip(whole, counts, strict=True)]


def reinforce_plus_plus(rng: random.Random) -> tuple[Numbers, Numbers]:
    n = rng.randint(1, 40)
    kls, mask, reward, coef, gamma = normal(rng, n), bits(rng, n), rng.gauss(0, 2), rng.random(), rng.random()
    mask[rng.randrange(n)] = 1
    returns = advantages.get_reinforce_plus_plus_returns(
        [reward], [tensor(kls)], [torch.tensor(mask)], [n], [n + 1], coef, gamma
    )
    return returns, brute_force.reinforce_plus_plus(reward, kls, mask, coef, gamma)


def reinforce_plus_plus_baseline(rng: random.Random) -> tuple[Numbers, Numbers]:
    kls, reward, coef = normal(rng, rng.randint(0, 12)), rng.gauss(0, 2), rng.random()
    result = advantages.get_reinforce_plus_plus_baseline_advantages([reward], [tensor(kls)], [tensor([])], coef)
    return result, [reward - coef * k for k in kls]


def ppo_gae(rng: random.Random) -> tuple[Numbers, Numbers]:
    """With the masks of tools, all-masked responses among them."""
    counts, gamma, lambd, coef = lengths(rng, 40), rng.random(), rng.random(), rng.random()
    kls, values, masks = ([of(rng, n) for n in counts] for of in (normal, normal, bits))
    scores = normal(rng, len(counts))
    trained = TrainedTokens([torch.tensor(mask, dtype=torch.int64) for mask in masks])
    closed_kls, closed_values = (trained.close_up([tensor(row) for row in column]) for column in (kls, values))
    per_token = [advantages.token_rewards(r, k, coef) for r, k in zip(scores, closed_kls, strict=True)]
    found = advantages.get_advantages_and_returns_batch(
        [n + 1 for n in counts], trained.lengths, closed_values, per_token, gamma, lambd, rng.random() < 0.5
    )
    rows = zip(scores, kls, values, masks, strict=True)
    expected = [brute_force.ppo_advantages(*row, coef, gamma, lambd) for row in rows]
    return [trained.spread(column) for column in found], [[a for a, _ in expected], [r for _, r in expected]]


def gae_chunks(rng: random.Random) -> tuple[Numbers, Numbers]:
    n, gamma, lambd = rng.randint(1, 60), rng.random(), rng.random()
    r, v = normal(rng, n), normal(rng, n)
    actual = advantages.chunked_gae(tensor([r]), tensor([v]), gamma, lambd, rng.randint(1, 70))
    return actual, brute_force.gae(r, v, gamma, lambd)


def discounted_returns(rng: random.Random) -> tuple[Numbers, Numbers]:
    r, gamma = normal(rng, rng.randint(0, 60)), rng.random()
    return discounted_suffix_sums(tensor(r), gamma, rng.randint(1, 70)), brute_force.discounted(r, gamma)


def whitening(rng: random.Random) -> tuple[Numbers, Numbers]:
    n, shift = rng.randint(2, 40), rng.random() < 0.5
    # scales from 0.1: of nearly equal values any rounding is divided by their tiny deviation
    scale = 10 ** rng.uniform(-1, 0.3)
    values, mask = [rng.gauss(1, scale) for _ in range(n)], bits(rng, n)
    mask[0] = mask[-1] = 1
    actual = masked_whiten(tensor(values), torch.tensor(mask), shift_mean=shift)
    return actual, brute_force.whiten(values, mask, shift)


def opd(rng: random.Random) -> tuple[Numbers, Numbers]:
    counts, coef = lengths(rng), rng.random()
    a, s, t = ([normal(rng, n) for n in counts] for _ in range(3))
    columns = [[tensor(row) for row in column] for column in (a, s, t)]
    kls = [[x - y for x, y in zip(u, v, strict=True)] for u, v in zip(s, t, strict=True)]
    return advantages.distill(*columns, coef), [
        [[x - coef * k for x, k in zip(u, v, strict=True)] for u, v in zip(a, kls, strict=True)], kls
    ]  # fmt: skip


def clip_of(dual: bool) -> Proof:
    def proof(rng: random.Random) -> tuple[Numbers, Numbers]:
        n = rng.randint(0, 20)
        kls, advantage = normal(rng, n), normal(rng, n)
        bounds = (rng.random() / 2, rng.random() / 2, 1.001 + 3 * rng.random() if dual else None)
        loss, fraction = losses.compute_policy_loss(tensor(kls), tensor(advantage), *bounds)
        return torch.stack([loss, fraction], 1), [
            brute_force.ppo(*row, *bounds) for row in zip(kls, advantage, strict=True)
        ]

    return proof


def cispo(rng: random.Random) -> tuple[Numbers, Numbers]:
    n, low, high = rng.randint(0, 20), rng.random(), rng.random()
    columns = [normal(rng, n) for _ in range(3)]
    loss, fraction = losses.compute_cispo_loss(*map(tensor, columns), low, high)
    rows = zip(*columns, strict=True)
    return torch.stack([loss, fraction], 1), [brute_force.cispo(*row, low, high) for row in rows]


def _tokens(rng: random.Random) -> list[list[tuple[float, float, int, float]]]:
    """(new, old, mask, advantage) by sample."""
    return [list(zip(normal(rng, n), normal(rng, n), bits(rng, n), normal(rng, n), strict=True)) for n in lengths(rng)]


def _columns(samples: list[list[tuple[float, float, int, float]]]) -> list[list[Tensor]]:
    return [[tensor([token[field] for token in sample]) for sample in samples] for field in range(4)]


def gspo(rng: random.Random) -> tuple[Numbers, Numbers]:
    """Also with slices: a context-parallel rank has the loss of a part of the tokens."""
    samples = _tokens(rng)
    new, old, mask, _ = _columns(samples)
    local = [row[:: rng.randint(1, 3)] for row in new]
    means = [brute_force.masked_mean([t[1] - t[0] for t in s], [t[2] for t in s]) for s in samples]
    return losses.compute_gspo_kl(new, old, local, mask), [
        [mean] * len(row) for mean, row in zip(means, local, strict=True)
    ]


def opsm(rng: random.Random) -> tuple[Numbers, Numbers]:
    samples, delta = _tokens(rng), rng.random() / 10
    new, old, mask, advantage = _columns(samples)
    actual = losses.compute_opsm_mask(SimpleNamespace(opsm_delta=delta), new, old, advantage, mask)
    return actual, brute_force.opsm(samples, delta)


def value_loss(rng: random.Random) -> tuple[Numbers, Numbers]:
    n, bound = rng.randint(0, 20), rng.random()
    columns = [normal(rng, n) for _ in range(3)]
    loss, fraction = compute_value_loss(*map(tensor, columns), bound)
    return torch.stack([loss, fraction], 1), [brute_force.value(*row, bound) for row in zip(*columns, strict=True)]


def weights_of(masks: bool) -> Proof:
    weigh = mis.icepop_weights if masks else mis.truncated_importance_weights

    def proof(rng: random.Random) -> tuple[Numbers, Numbers]:
        n, low, high = rng.randint(0, 20), rng.random(), 1 + rng.random()
        train, rollout = normal(rng, n), normal(rng, n)
        expected = [brute_force.bounded_ratio(*row, low, high, masks) for row in zip(train, rollout, strict=True)]
        return weigh(tensor(train), tensor(rollout), low, high).weights, expected

    return proof


def mis_of(level: str, mode: str) -> Proof:
    def proof(rng: random.Random) -> tuple[Numbers, Numbers]:
        settings = {"use_tis": True, "tis_level": level, "tis_mode": mode, "tis_upper_bound": 1 + rng.random()}
        settings.update(tis_lower_bound=rng.random(), use_rs=rng.random() < 0.7, rs_level=rng.choice(mis.LEVELS))
        settings.update(rs_lower_bound=rng.random(), rs_upper_bound=1 + rng.random())
        settings.update(rs_veto_threshold=rng.choice([None, rng.random() / 5]))
        args, samples = SimpleNamespace(**settings), _tokens(rng)
        train, rollout, _, _ = _columns(samples)
        masks = [torch.tensor([token[2] for token in sample], dtype=torch.int32) for sample in samples]
        data = {"train_log_probs": train, "rollout_log_probs": rollout, "loss_masks": masks}
        return mis.compute_mis_weights(args, **data)[:2], brute_force.mis(args, data)

    return proof


def mismatch_meter(rng: random.Random) -> tuple[Numbers, Numbers]:
    sample = [token[:3] for token in _tokens(rng)[0]]
    columns = [tensor([token[field] for token in sample]) for field in range(3)]
    return mismatch.mismatch_sums(*columns), brute_force.mismatch(sample)


def reducer_of(kind: str) -> Proof:
    """Cut into two parts at random places, as micro-batches and context-parallel ranks do; siblings share a divisor."""

    def proof(rng: random.Random) -> tuple[Numbers, Numbers]:
        counts = lengths(rng)
        values, masks = [normal(rng, n) for n in counts], [bits(rng, n) for n in counts]
        trajectories = [rng.randint(0, 2) for _ in counts]
        sums = [
            float(sum(sum(mask) for mask, other in zip(masks, trajectories, strict=True) if other == own))
            for own in trajectories
        ]
        length = rng.uniform(1, 50)
        total = torch.zeros((), dtype=torch.float64)
        cuts = [rng.randint(0, n) for n in counts]
        for part in (lambda row, cut: row[:cut], lambda row, cut: row[cut:]):
            local = [torch.tensor(part(mask, cut)) for mask, cut in zip(masks, cuts, strict=True)]
            flat = tensor([v for row, cut in zip(values, cuts, strict=True) for v in part(row, cut)])
            if kind == "rollout mean":
                reduce = reducers.rollout_mean(local, tensor(sums))
            elif kind == "constant length":
                reduce = reducers.constant_length(local, length)
            else:
                reduce = reducers.token_sum(local)
            total = total + reduce(flat)
        one, fixed = [1.0] * len(counts), [length] * len(counts)
        divisors = {"rollout mean": [max(s, 1.0) for s in sums], "constant length": fixed, "token sum": one}[kind]
        return total, brute_force.reduced(values, masks, divisors)

    return proof


def log_probs_and_entropy(rng: random.Random) -> tuple[Numbers, Numbers]:
    rows, vocab, padding, temperature = rng.randint(0, 6), rng.randint(1, 20), rng.randint(0, 4), rng.uniform(0.3, 2)
    logits = [normal(rng, vocab + padding) for _ in range(rows)]
    targets = [rng.randrange(vocab) for _ in range(rows)]
    found = log_probs.log_probs_and_entropy(
        tensor(logits).reshape(rows, vocab + padding), torch.tensor(targets, dtype=torch.long),
        chunk_size=rng.randint(1, 8), with_entropy=True, temperature=temperature, vocab_size=vocab,
    )  # fmt: skip
    rows_ = zip(logits, targets, strict=True)
    expected = [brute_force.log_prob_and_entropy(z[:vocab], target, temperature) for z, target in rows_]
    return found, [[p for p, _ in expected], [h for _, h in expected]]


PROOFS: dict[str, Proof] = {
    **{f"KL {kind}": kl_of(kind, False) for kind in kl.KL_TYPES},
    **{f"KL {kind}, unbiased": kl_of(kind, True) for kind in kl.KL_TYPES},
    "advantages grpo, gspo, cispo": grpo,
    "advantages rloo": rloo,
    "advantages reinforce_plus_plus": reinforce_plus_plus,
    "advantages reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "advantages ppo (GAE)": ppo_gae,
    "GAE in chunks": gae_chunks,
    "discounted returns in chunks": discounted_returns,
    "on-policy distillation": opd,
    "whitening": whitening,
    "PPO-clip, clip-higher": clip_of(False),
    "dual clip": clip_of(True),
    "CISPO": cispo,
    "GSPO": gspo,
    "OPSM": opsm,
    "value loss": value_loss,
    "TIS": weights_of(False),
    "IcePop": weights_of(True),
    **{f"MIS {level}, {mode}": mis_of(level, mode) for level in mis.LEVELS for mode in mis.MODES},
    "mismatch meter": mismatch_meter,
    "reducer rollout mean": reducer_of("rollout mean"),
    "reducer token sum": reducer_of("token sum"),
    "reducer constant length (Dr. GRPO)": reducer_of("constant length"),
    "log-probs and entropy (also SFT)": log_probs_and_entropy,
}


def table(cases: int) -> list[tuple[str, float]]:
    return [(name, largest_error(proof, cases)) for name, proof in PROOFS.items()]


if __name__ == "__main__":
    torch.set_num_threads(1)
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    for name, error in table(count):
        print(f"{name:45} {error:.1e} in {count} cases")

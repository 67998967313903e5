"""Calls of the loss helpers: ``ppo_utils``, ``cp_utils``, ``loss``, and the example correction.

Numbers are worked out from the formulas by hand, or in ``math`` one token at a time.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.arguments import run_args
from tests.support.reference_calls import Call, check_equal

PPO, CP, LOSS = (
    "slime.utils.ppo_utils.",
    "slime.backends.megatron_utils.cp_utils.",
    "slime.backends.megatron_utils.loss.",
)
T = torch.tensor
LN2 = math.log(2.0)

# One sample of three tokens, prompt of one, in a vocabulary of two: softmax(0, ln 3) = (1/4, 3/4), of (0, 0) = halves.
LOGITS = [[0.0, math.log(3.0)], [0.0, 0.0], [5.0, 9.0]]
H3 = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))


def sample(**more: Any) -> dict[str, Any]:
    args = SimpleNamespace(rollout_temperature=0.5, entropy_coef=0.0, log_probs_chunk_size=-1, vocab_size=None)
    return {
        "logits": T([LOGITS], requires_grad=True) * 1.0,
        "args": args,
        "unconcat_tokens": [T([0, 1, 0])],
        "total_lengths": [3],
        "response_lengths": [2],
        **more,
    }


def log_probs_at(temperature: float) -> tuple[list[float], list[float]]:
    """(log-probs, entropies) of tokens 1 and 0 after rows 0 and 1 of ``LOGITS``."""
    high = math.exp(math.log(3.0) / temperature)
    p, q = high / (1 + high), 1 / (1 + high)
    return [math.log(p), math.log(0.5)], [-(p * math.log(p) + q * math.log(q)), LN2]


def of_responses(*, temperature: float, gradient: bool | None) -> Any:
    def check(result: Any) -> None:
        log_probs, entropy = log_probs_at(temperature)
        empty, found = result
        assert empty.numel() == 0
        check_equal(found["log_probs"], [log_probs])
        if gradient is None:
            assert "entropy" not in found
        else:
            check_equal(found["entropy"], [entropy])
            assert found["entropy"][0].requires_grad is gradient
        assert found["log_probs"][0].requires_grad

    return check


def chunks_of_logits(temperature: float) -> Any:
    def check(result: Any) -> None:
        check_equal(list(result), [(T(LOGITS[:2]) / temperature, T([1, 0]))])

    return check


def calculated(*, kept: bool, with_entropy: bool, gradient: bool = False) -> Any:
    """Rows (0, ln 3) and (0, 0) with tokens 1 and 0. A mask that keeps column 0 alone leaves the tokens themselves."""
    log_probs = [[math.log(0.75)], [0.0 if kept else -LN2]]

    def check(result: Any) -> None:
        check_equal(result[0], log_probs)
        if with_entropy:
            check_equal(result[1], [H3, LN2])
            assert result[1].requires_grad is gradient
        else:
            assert result[1] is None

    return check


def two_rows(**more: Any) -> dict[str, Any]:
    return {"logits": T(LOGITS[:2], requires_grad=True) * 1.0, "tokens": T([1, 0]), "tp_group": None, **more}


def two_samples(**more: Any) -> dict[str, Any]:
    masks = [T([1.0, 0.0, 1.0]), T([1.0])]
    return {"total_lengths": [5, 2], "response_lengths": [3, 1], "loss_masks": masks, **more}


def reduces(values: list[float], expected: float) -> Any:
    return lambda reducer: check_equal(reducer(T(values)), expected)


FIVE = [1.0, 100.0, 3.0, 7.0]  # the second is masked
DRIFT = {  # the first sequence moved by ln 2 on its one trained token, the other did not
    "full_log_probs": [T([-LN2, 5.0]), T([-1.0])],
    "full_old_log_probs": [T([0.0, 0.0]), T([-1.0])],
    "loss_masks": [T([1.0, 0.0]), T([1.0])],
}


def opsm() -> dict[str, Any]:
    return {
        "args": SimpleNamespace(opsm_delta=0.5),
        "full_log_probs": DRIFT["full_log_probs"],
        "full_old_log_probs": DRIFT["full_old_log_probs"],
        "advantages": [T([-1.0, -1.0]), T([-1.0])],
        "loss_masks": DRIFT["loss_masks"],
    }


PPO_CALLS = [
    *(
        Call(PPO + "compute_approx_kl", {"log_probs": T([0.0]), "log_probs_base": T([-LN2]), "kl_loss_type": k}, [kl])
        for k, kl in [("k1", LN2), ("k2", LN2**2 / 2), ("k3", 0.5 - 1 + LN2), ("low_var_kl", 0.5 - 1 + LN2)]
    ),
    Call(
        PPO + "compute_approx_kl",
        {"log_probs": T([0.0]), "log_probs_base": T([-LN2]), "kl_loss_type": "k1", "importance_ratio": T([3.0])},
        [3 * LN2],
    ),
    Call(  # ratios 2, 1/2 and 2 with A = 1, 1, -1: clipped to 1.2; not; not clipped, as the worse of the two counts
        PPO + "compute_policy_loss",
        {"ppo_kl": T([-LN2, LN2, -LN2]), "advantages": T([1.0, 1.0, -1.0]), "eps_clip": 0.1, "eps_clip_high": 0.2},
        ([-1.2, -0.5, 2.0], [1.0, 0.0, 0.0]),
    ),
    Call(
        PPO + "compute_policy_loss",
        {"ppo_kl": T([-LN2]), "advantages": T([-1.0]), "eps_clip": 0.1, "eps_clip_high": 0.2, "eps_clip_c": 1.5},
        ([1.5], [0.0]),
    ),
    Call(
        PPO + "compute_cispo_loss",
        {
            "ppo_kl": T([-LN2, LN2]),
            "log_probs": T([-3.0, -1.0]),
            "advantages": T([1.0, 2.0]),
            "eps_clip": 0.6,
            "eps_clip_high": 0.2,
        },
        ([1.2 * 3, 0.5 * 2], [1.0, 0.0]),
    ),
    Call(
        PPO + "compute_gspo_kl",
        {
            "full_log_probs": DRIFT["full_log_probs"],
            "full_old_log_probs": DRIFT["full_old_log_probs"],
            "local_log_probs": DRIFT["full_log_probs"],
            "loss_masks": DRIFT["loss_masks"],
        },
        [LN2, LN2, 0.0],
    ),
    Call(PPO + "compute_opsm_mask", opsm, ([0.0, 0.0, 1.0], 1.0)),
    Call(PPO + "calculate_log_probs_and_entropy", two_rows, calculated(kept=False, with_entropy=False)),
    Call(
        PPO + "calculate_log_probs_and_entropy",
        lambda: two_rows(with_entropy=True, chunk_size=1),
        calculated(kept=False, with_entropy=True, gradient=True),
    ),
    Call(
        PPO + "calculate_log_probs_and_entropy",
        lambda: two_rows(
            with_entropy=True,
            chunk_size=-1,
            log_prob_keep_mask=T([[True, True], [False, False]]),
            with_entropy_grad=False,
        ),
        calculated(kept=True, with_entropy=True),
    ),
    Call(PPO + "get_grpo_returns", {"rewards": [2.0, -1.0], "kl": [T([0.0, 0.0]), T([0.0])]}, [[2.0, 2.0], [-1.0]]),
    Call(  # rewards -0.1 and 3 of the two trained tokens, one step apart
        PPO + "get_reinforce_plus_plus_returns",
        {
            "rewards": [3.0],
            "kl": [T([1.0, 7.0, 0.0, 9.0])],
            "loss_masks": [T([1.0, 0.0, 1.0, 0.0])],
            "response_lengths": [4],
            "total_lengths": [6],
            "kl_coef": 0.1,
            "gamma": 0.5,
        },
        [[-0.1 + 1.5, 0.0, 3.0, 0.0]],
    ),
    Call(
        PPO + "get_reinforce_plus_plus_baseline_advantages",
        {"rewards": [2.0], "kl": [T([1.0, 3.0])], "loss_masks": [T([1.0, 1.0])], "kl_coef": 0.5},
        [[1.5, 0.5]],
    ),
    *(
        Call(  # deltas 0.5 * 2 - 1 = 0 and 4 - 2 = 2; A = (0 + 0.25 * 2, 2)
            PPO + "get_advantages_and_returns_batch",
            {
                "total_lengths": [4, 2],
                "response_lengths": [2, 1],
                "values_list": [T([1.0, 2.0]), T([1.0])],
                "rewards_list": [T([0.0, 4.0]), T([3.0])],
                "gamma": 0.5,
                "lambd": 0.5,
                **chunked,
            },
            ([[0.5, 2.0], [2.0]], [[1.5, 4.0], [3.0]]),
        )
        for chunked in ({}, {"chunked": True}, {"chunked": False})
    ),
    *(
        Call(
            PPO + name,
            {"rewards": T([[0.0, 4.0]]), "values": T([[1.0, 2.0]]), "gamma": 0.5, "lambd": 0.5, **chunk},
            ([[0.5, 2.0]], [[1.5, 4.0]]),
        )
        for name, chunk in [("vanilla_gae", {}), ("chunked_gae", {}), ("chunked_gae", {"chunk_size": 1})]
    ),
    *(
        Call(
            PPO + "chunked_discounted_returns",
            {"rewards": T([[1.0, 2.0, 4.0]]), "discount": 0.5, **chunk},
            [[1 + 1 + 1.0, 2 + 2.0, 4.0]],
        )
        for chunk in ({}, {"chunk_size": 2})
    ),
    Call(
        PPO + "compute_log_probs",
        {"logits": T(LOGITS[:2]), "tokens": T([1, 0]), "process_group": None},
        [[math.log(0.75)], [-LN2]],
    ),
]

LENGTHS = {"total_length": 5, "response_length": 3}
THD = {"qkv_format": "thd", "max_seq_len": None}
CP_CALLS = [
    Call(CP + "all_gather_with_cp", {"tensor": T([1.0, 2.0, 3.0]), **LENGTHS}, [1.0, 2.0, 3.0]),
    Call(CP + "slice_log_prob_with_cp", {"log_prob": [1.0, 2.0, 3.0], **LENGTHS}, [1.0, 2.0, 3.0]),
    Call(
        CP + "slice_log_prob_with_cp",
        {"log_prob": T([1.0, 2.0, 3.0]), **LENGTHS, "qkv_format": "thd", "max_token_len": None},
        [1.0, 2.0, 3.0],
    ),
    *(  # one rank holds chunks 0 and 1 of three positions; logits 1..3 predict tokens 2..4
        Call(
            CP + "get_logits_and_tokens_offset_with_cp",
            {**LENGTHS, **layout},
            (3, ((0, 3), (3, 6)), ((1, 3), (3, 4)), ((2, 4), (4, 5))),
        )
        for layout in ({}, THD)
    ),
    *(
        Call(CP + "slice_with_cp", {"tokens": T([4, 5, 6]), "pad_value": 0, **layout}, [4, 5, 6])
        for layout in ({}, THD)
    ),
    Call(CP + "get_sum_of_sample_mean", two_samples, reduces(FIVE, (1 + 3) / 2 + 7)),
    Call(CP + "get_sum_of_sample_mean", lambda: two_samples(calculate_per_token_loss=True), reduces(FIVE, 11.0)),
    Call(
        CP + "get_sum_of_sample_mean",
        lambda: two_samples(
            calculate_per_token_loss=False, qkv_format="thd", max_seq_lens=None, sample_denoms=T([4.0, 8.0])
        ),
        reduces(FIVE, (1 + 3) / 4 + 7 / 8),
    ),
]

RATIOS = {  # of the trainer's probabilities to the engine's: 4, 1 and 1/4; bounds 1/2 and 2
    "args": SimpleNamespace(tis_clip_low=0.5, tis_clip=2.0),
    "pg_loss": T([1.0, 1.0, 1.0]),
    "train_log_probs": [T([2 * LN2, 0.0, -2 * LN2])],
    "rollout_log_probs": [T([0.0, 0.0, 0.0])],
    "loss_masks": [T([1, 1, 1])],
    "total_lengths": [5],
    "response_lengths": [3],
}
SEEN = {"tis": [4.0, 1.0, 0.25], "tis_clipfrac": [1.0, 0.0, 1.0], "tis_abs": [3.0, 0.0, 0.75]}
MIS = SimpleNamespace(
    use_tis=True, use_rs=False, tis_level="token", tis_mode="truncate", tis_upper_bound=2.0, tis_lower_bound=None,
    rs_level="token", rs_lower_bound=None, rs_upper_bound=None, rs_veto_threshold=None, tis_batch_normalize=False,
)  # fmt: skip


def truncated_by_the_example(result: Any) -> None:
    """Mode ``truncate`` bounds from above only."""
    loss, masks, metrics = result
    check_equal(loss, [2.0, 1.0, 0.25])
    check_equal(list(masks), [[1, 1, 1]])
    assert all(name.startswith("mis_") for name in metrics)


def policy() -> dict[str, Any]:
    given = sample()
    args = run_args(eps_clip=0.2, eps_clip_high=0.3, vocab_size=None)
    batch = {key: given[key] for key in ("unconcat_tokens", "total_lengths", "response_lengths")}
    batch |= {"loss_masks": [T([1, 1])], "advantages": [T([1.0, 3.0])], "log_probs": [T([math.log(0.75), -LN2])]}
    return {"args": args, "batch": batch, "logits": given["logits"], "sum_of_sample_mean": lambda values: values.mean()}


def on_policy_loss(result: Any) -> None:
    """The ratio is 1, so the loss is the mean of -A."""
    check_equal(result[0], -2.0)
    for name, value in {"pg_loss": -2.0, "pg_clipfrac": 0.0, "ppo_kl": 0.0, "entropy_loss": (H3 + LN2) / 2}.items():
        check_equal(result[1][name], value)


def critic() -> dict[str, Any]:
    given = sample(logits=T([[[1.0], [5.0], [9.0]]]))
    batch = {key: given[key] for key in ("unconcat_tokens", "total_lengths", "response_lengths")}
    batch |= {"values": [T([1.0, 2.0])], "returns": [T([0.0, 4.0])]}
    args = SimpleNamespace(value_clip=0.5)
    return {"args": args, "batch": batch, "logits": given["logits"], "sum_of_sample_mean": lambda values: values.sum()}


TWO_RESPONSES = {"total_lengths": [5, 2], "response_lengths": [2, 1], "loss_masks": [T([1, 1]), T([1])]}


def estimated(_: Any, __: Any, given: dict[str, Any]) -> None:
    for name in ("advantages", "returns"):
        check_equal(given["rollout_data"][name], [[1.5, 1.5], [-1.0]])
    check_equal(given["rollout_data"]["kl"], [[0.0, 0.0], [0.0]])


LOSS_CALLS = [
    Call(LOSS + "get_log_probs_and_entropy", sample, of_responses(temperature=0.5, gradient=None)),
    Call(
        LOSS + "get_log_probs_and_entropy",
        lambda: sample(with_entropy=True, non_loss_data=True, max_seq_lens=None, apply_temperature=False),
        of_responses(temperature=1.0, gradient=False),
    ),
    *(
        Call(
            LOSS + "get_log_probs_and_entropy",
            lambda gradient=gradient: sample(with_entropy=True, with_entropy_grad=gradient),
            of_responses(temperature=0.5, gradient=gradient),
        )
        for gradient in (True, False)
    ),
    Call(
        LOSS + "get_rollout_top_p_logprob_kwargs",
        {"args": SimpleNamespace(rollout_top_p=0.9), "batch": {"rollout_top_p_token_ids": [T([1])], "tokens": None}},
        {"top_p_token_ids": [[1]]},
    ),
    Call(LOSS + "get_responses", sample, chunks_of_logits(0.5)),
    Call(LOSS + "get_responses", lambda: sample(max_seq_lens=None, apply_temperature=False), chunks_of_logits(1.0)),
    Call(
        LOSS + "get_values",
        lambda: sample(logits=T([[[1.0], [5.0], [9.0]]]), with_entropy=False, non_loss_data=True, max_seq_lens=None),
        lambda result: check_equal(result[1], {"values": [[1.0, 5.0]]}),
    ),
    Call(LOSS + "policy_loss_function", policy, on_policy_loss),
    Call(
        LOSS + "sft_loss_function",
        policy,
        lambda result: check_equal(result[0], -(math.log(0.75) - LN2) / 2),
    ),
    Call(  # values 1 and 5 for old 1 and 2, clipped to 1 and 2.5: max(1, 1) + max(1.5^2, 1)
        LOSS + "value_loss_function",
        critic,
        lambda result: check_equal(result, (3.25, {"value_loss": 3.25, "value_clipfrac": 1.0})),
    ),
    Call(
        LOSS + "compute_advantages_and_returns",
        lambda: {
            "args": SimpleNamespace(kl_coef=0.0, advantage_estimator="grpo", use_opd=False, normalize_advantages=False),
            "rollout_data": {
                "rewards": [1.5, -1.0],
                **two_samples(response_lengths=[2, 1], loss_masks=[T([1, 1]), T([1])]),
            },
        },
        estimated,
    ),
    Call(LOSS + "vanilla_tis_function", RATIOS, ([2.0, 1.0, 0.5], [[1, 1, 1]], SEEN)),
    Call(LOSS + "icepop_function", RATIOS, ([0.0, 1.0, 0.0], [[1, 1, 1]], SEEN)),
    Call(
        "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp",
        {**RATIOS, "args": MIS},
        truncated_by_the_example,
    ),
]
CALLS = [*PPO_CALLS, *CP_CALLS, *LOSS_CALLS]

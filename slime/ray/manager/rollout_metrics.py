"""Metrics of a rollout or an evaluation, and of its engine calls. Pure functions over samples."""

from __future__ import annotations

import logging
import math
import numbers
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from slime.algorithms.estimators import estimator_of
from slime.algorithms.rewards import reward_failed
from slime.arguments.args import Args
from slime.rollout.staleness import trained_steps, weight_clock
from slime.utils.types import Sample, iter_samples

logger = logging.getLogger(__name__)

REPETITION_WINDOW = 10_000
REPETITION_RATIO = 10.0
MAX_LAG_SHOWN = 16

_REQUEST_ATTRIBUTES = {
    "e2e_latency": "request/e2e_latency",
    "queue_time": "request/queue_time",
    "decode_throughput": "decode/throughput",
}
_PHASES = {
    "sglang_prefill": "prefill/time",
    "sglang_pd_prefill": "prefill/time",
    "sglang_decode": "decode/time",
    "sglang_pd_decode": "decode/time",
}
"""By the span of a trace."""


def rollout_metrics(args: Args, samples: Sequence[Sample], seconds: float) -> dict[str, float]:
    """Return ``rollout/*``, ``perf/*`` and ``agent/*`` of one training rollout that took ``seconds``; samples are flat
    (n >= 1)."""
    found = {f"rollout/{name}": value for name, value in sample_metrics(args, samples).items()}
    found |= {f"rollout/{name}": value for name, value in zero_std_counts(args, samples).items()}
    found |= {f"perf/{name}": value for name, value in speed_metrics(args, samples, seconds).items()}
    return found | {f"agent/{name}": value for name, value in agent_metrics(samples).items()}


def asked_for_metrics(args: Args, samples: Sequence[Sample]) -> dict[str, float]:
    """Return ``passrate/*`` (``--log-passrate``) and ``multi_turn/*`` (``--log-multi-turn``) of flat samples (n >= 1).

    A pass is a raw reward of exactly 1, of one sample at least where a trajectory made several; groups go by
    ``group_index``.
    """
    found: dict[str, float] = {}
    if args.log_passrate:
        overrides = [(sample.metadata or {}).get("raw_reward") for sample in samples]
        rewards = [s.get_reward_value(args) if raw is None else raw for s, raw in zip(samples, overrides, strict=True)]
        groups = _passes(samples, rewards)
        found |= {f"passrate/{name}": value for name, value in pass_rates(groups).items()}
    if args.log_multi_turn:
        found |= multi_turn_metrics(args, samples)
    return found


def multi_turn_metrics(args: Args, samples: Sequence[Sample]) -> dict[str, float]:
    """Return response lengths with and without the tokens the environment wrote, and ``metadata["round_number"]``."""
    raw = [s.response_length for s in samples]
    rounds = [(s.metadata or {}).get("round_number") for s in samples]
    columns = {
        "raw_response_length/response_length": raw,
        "wo_obs_response_length/response_length": [s.effective_response_length for s in samples],
        "multi_turn_metric/round_number": [number for number in rounds if number is not None],
    }
    found = {
        f"multi_turn/{name}_{kind}": value
        for name, values in columns.items()
        if values
        for kind, value in (("mean", sum(values) / len(values)), ("max", max(values)), ("min", min(values)))
    }
    if limit := args.rollout_max_response_len:
        found["multi_turn/raw_response_length/response_length_clip_ratio"] = _share(length >= limit for length in raw)
    return found


def agent_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return what became of the tokens that agents' sessions generated; nothing without a session of a gateway."""
    counts = [counts for sample in samples if (counts := getattr(sample, "agent_session", None)) is not None]
    sessions = list({one["session"]: one for one in counts}.values())  # each sample has the counts of its session
    if not sessions:
        return {}
    total = {name: sum(one[name] for one in sessions) for name in sessions[0] if name != "session"}
    return {
        "realign_tokens": total["realign_tokens"],
        "forks_per_session": total["forks"] / len(sessions),
        "trained_token_share": total["trained_tokens"] / max(1, total["generated_tokens"]),
    }


def environment_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return ``environment/<name>/...`` of every environment that ``samples`` have episodes of."""
    episodes: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for sample in samples:
        if (episode := getattr(sample, "environment_episode", None)) is not None:
            episodes[episode["environment"]].append(episode)
    found: dict[str, float] = {}
    for name, ones in episodes.items():
        found[f"environment/{name}/episodes"] = float(len(ones))
        for key in ("reward", "success", "turns", "tool_calls", "seconds", "difficulty", "rewritten_by_template"):
            if values := [float(one[key]) for one in ones if one[key] is not None]:
                found[f"environment/{name}/{key}"] = sum(values) / len(values)
        if calls := sum(one["tool_calls"] for one in ones):
            found[f"environment/{name}/tool_error_rate"] = sum(one["tool_errors"] for one in ones) / calls
    return found


def eval_metrics(args: Args, data: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return ``eval/*``: per data set its mean reward, the share of truncated samples and what rollouts report too.

    Rewards and passes are those of trajectories, where the samples are known; the rest is of samples.
    """
    found: dict[str, float] = {}
    for name, result in data.items():
        odd = next((r for r in result["rewards"] if not isinstance(r, numbers.Real)), None)
        if odd is not None or not result["rewards"]:
            raise ValueError(
                f"evaluation data set {name!r}: expected a number as the reward of every sample, got "
                f"{'none' if odd is None else repr(odd)}. Of rewards that are objects --eval-reward-key takes one entry"
            )
        rewards = [float(r) for r in result["rewards"]]
        found[f"eval/{name}"] = _mean(trajectory_rewards(result))
        if samples := list(iter_samples(result.get("samples") or [])):
            of_samples = sample_metrics(args, samples) | top_p_metrics(samples, prefix="")
            if len(samples) == len(rewards):
                of_samples |= zero_std_counts(args, samples, result["rewards"])
            found |= {f"eval/{name}/{key}": value for key, value in of_samples.items()}
        if "truncated" in result:
            found[f"eval/{name}-truncated_ratio"] = sum(map(bool, result["truncated"])) / len(rewards)
        if args.log_passrate and samples:
            if len(samples) != len(rewards):
                raise ValueError(
                    f"evaluation data set {name!r} has {len(samples)} samples and {len(rewards)} rewards; "
                    "--log-passrate needs one for each"
                )
            groups = _passes(samples, rewards)
            found |= {f"eval/{name}-{key}": value for key, value in pass_rates(groups).items()}
    return found


def eval_summary(data: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line per evaluation data set: the mean reward (accuracy, where rewards are 0 or 1) and the samples."""
    lines = []
    for name, result in data.items():
        rewards = trajectory_rewards(result)
        if not rewards:
            lines.append(f"{name}: no rewards that are numbers")
            continue
        mean, count = _mean(rewards), len([r for r in result["rewards"] if isinstance(r, numbers.Real)])
        parts = [f"mean reward {mean:.4g}"]
        parts.append(f"{count} samples" + (f" of {len(rewards)} trajectories" if count != len(rewards) else ""))
        if truncated := result.get("truncated"):
            parts.append(f"{_share(map(bool, truncated)):.1%} of them truncated")
        lines.append(f"{name}: {', '.join(parts)}")
    return lines


def trajectory_rewards(result: Mapping[str, Any]) -> list[float]:
    """Return a reward per trajectory of an evaluated data set: the mean of its samples'; what is no number is left out.

    Without ``samples``, one for each of the ``rewards``, every reward is that of a trajectory.
    """
    rewards = result.get("rewards") or []
    samples = list(iter_samples(result.get("samples") or []))
    if len(samples) != len(rewards):
        samples = [Sample() for _ in rewards]
    pairs = [(sample, float(r)) for sample, r in zip(samples, rewards, strict=True) if isinstance(r, numbers.Real)]
    groups = _groups([sample for sample, _ in pairs], [reward for _, reward in pairs])
    return [_mean(trajectory) for trajectories in groups for trajectory in trajectories]


def sample_metrics(args: Args, samples: Sequence[Sample]) -> dict[str, float]:
    """Return what training and evaluation rollouts have in common: lengths, truncation, repetition, cache, episodes,
    versions."""
    found = statistics([s.effective_response_length for s in samples], "response_len/")
    found["truncated_ratio"] = _share(s.status == Sample.Status.TRUNCATED for s in samples)
    found["repetition_frac"] = _share(is_repetitive(s.response) for s in samples)
    drafts = sum(s.spec_info.spec_draft_token_num for s in samples)
    if drafts or args.sglang_speculative_algorithm:
        accepted = sum(s.spec_info.spec_accept_token_num for s in samples)
        found["spec_accept_rate"] = accepted / max(drafts, 1)
        verified = sum(s.spec_info.spec_verify_ct for s in samples)
        found["spec_accept_length"] = sum(s.spec_info.completion_token_num for s in samples) / max(verified, 1)
    prompt_tokens = sum(s.prefix_cache_info.total_prompt_tokens for s in samples)
    cached = sum(s.prefix_cache_info.cached_tokens for s in samples)
    found["prefix_cache_hit_rate"] = cached / max(prompt_tokens, 1)
    found["avg_cached_tokens_per_sample"] = cached / len(samples)
    found |= environment_metrics(samples)
    named = {v for s in samples for v in (*s.weight_versions, *(span["version"] for span in s.weight_version_spans))}
    versions = [int(v) for v in named if str(v).isdigit()]
    if versions:
        found["weight_version/min"], found["weight_version/max"] = float(min(versions)), float(max(versions))
    if args.log_reward_category:
        rewards = [s.reward for s in samples if isinstance(s.reward, dict)]
        kinds = Counter(
            str(reward[args.log_reward_category]) for reward in rewards if args.log_reward_category in reward
        )
        found |= {f"error_cat/{kind}": count / len(samples) for kind, count in kinds.items()}
    return found


def zero_std_counts(args: Args, samples: Sequence[Sample], rewards: Sequence[Any] | None = None) -> dict[str, float]:
    """Return ``zero_std/count_<reward>``: groups (by ``group_index``) whose rewards are all equal teach nothing.

    Groups of one trajectory, and those with non-numeric rewards (dicts, or None, for a custom post-processing),
    are not counted. Of whole numbers that are integers the name without a fraction, as in slime <= 0.3.1, is kept too.
    """
    if estimator_of(args).needs_critic:
        return {}
    if rewards is None:
        samples = [sample for sample in samples if not reward_failed(sample)]
        rewards = [sample.get_reward_value(args) for sample in samples]
    groups = _groups(samples, rewards)
    counts: Counter[str] = Counter()
    for trajectories in groups:
        found = [reward for trajectory in trajectories for reward in trajectory]
        if not all(isinstance(reward, numbers.Real) for reward in found) or len(trajectories) < 2:
            continue
        if len(set(found)) == 1:
            counts.update({str(round(float(found[0]), 1)), str(round(found[0], 1))})
    return {f"zero_std/count_{reward}": float(count) for reward, count in sorted(counts.items())}


def speed_metrics(args: Args, samples: Sequence[Sample], seconds: float) -> dict[str, float]:
    """Return the rollout's time and tokens per second, of all response tokens and (``effective_``) of trained ones."""
    found = {"rollout_time": seconds}
    elsewhere = [s.non_generation_time for s in samples]
    if max(elsewhere) > 0:
        found |= statistics(elsewhere, "non_generation_time/")
    for prefix, lengths in (
        ("", [s.response_length for s in samples]),
        ("effective_", [s.effective_response_length for s in samples]),
    ):
        if args.rollout_num_gpus:
            found[f"{prefix}tokens_per_gpu_per_sec"] = sum(lengths) / seconds / args.rollout_num_gpus
        found[f"longest_{prefix}sample_tokens_per_sec"] = max(lengths) / seconds
        if max(elsewhere) > 0:
            of_longest = [time for time, length in zip(elsewhere, lengths, strict=True) if length == max(lengths)]
            away = sum(of_longest) / len(of_longest)
            found[f"longest_{prefix}sample_non_generation_time"] = away
            generating = max(seconds - away, 1e-9)
            found[f"longest_{prefix}sample_tokens_per_sec_without_non_generation"] = max(lengths) / generating
    return found


def headline(ranks: list[Any]) -> dict[str, float]:
    """Return the few numbers worth a line per rollout; of ``ranks`` those of the last pipeline stage have them."""
    result: dict[str, Any] = next((r for r in ranks if r and r.get("rollout")), {})
    steps = result.get("steps") or [{}]
    found = {
        "reward": result.get("rollout", {}).get("rollout/raw_reward"),
        "response length": result.get("rollout", {}).get("rollout/response_lengths"),
        "loss": steps[-1].get("loss"),
        "gradient norm": steps[-1].get("grad_norm"),
        "log-prob difference": steps[-1].get("train_rollout_logprob_abs_diff"),
    }
    return {name: float(value) for name, value in found.items() if value is not None}


def statistics(values: Sequence[float], prefix: str) -> dict[str, float]:
    """Return mean, median, max and min of ``values`` (n >= 1)."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    return {
        f"{prefix}mean": sum(ordered) / len(ordered),
        f"{prefix}median": float(median),
        f"{prefix}max": float(ordered[-1]),
        f"{prefix}min": float(ordered[0]),
    }


def pass_rates(groups: Iterable[Sequence[float]]) -> dict[str, float]:
    """Return ``pass@k`` for k = 1, 2, 4, ... up to the smallest group: the chance that one of k samples has reward 1.

    Unbiased estimate of Chen et al. 2021 (arXiv:2107.03374): 1 - C(n - c, k) / C(n, k), averaged over groups.
    """
    counts = [(len(group), sum(reward == 1 for reward in group)) for group in groups]
    smallest = min(n for n, _ in counts)
    rates = {}
    k = 1
    while k <= smallest:
        rates[f"pass@{k}"] = sum(1 - math.comb(n - c, k) / math.comb(n, k) for n, c in counts) / len(counts)
        k *= 2
    return rates


def is_repetitive(text: str) -> bool:
    """True when the end of a long text compresses so well that it must be repeating itself."""
    if len(text) <= REPETITION_WINDOW:
        return False
    raw = text[-REPETITION_WINDOW:].encode(errors="replace")
    return len(raw) / len(zlib.compress(raw, level=9)) > REPETITION_RATIO


def _groups(samples: Sequence[Sample], values: Sequence[Any]) -> list[list[list[Any]]]:
    """Return the values by group (``group_index``) and within it by trajectory (``rollout_id``).

    A sample without the one is a separate group, a sample without the other a separate trajectory.
    """
    groups: dict[Any, dict[Any, list[Any]]] = {}
    for number, (sample, value) in enumerate(zip(samples, values, strict=True)):
        group = ("alone", number) if sample.group_index is None else sample.group_index
        trajectory = ("alone", number) if sample.rollout_id is None else sample.rollout_id
        groups.setdefault(group, {}).setdefault(trajectory, []).append(value)
    return [list(trajectories.values()) for trajectories in groups.values()]


def _passes(samples: Sequence[Sample], rewards: Sequence[Any]) -> list[list[float]]:
    """Return per group 1.0 for every trajectory with a reward of 1 and 0.0 for every other."""
    return [
        [float(any(reward == 1 for reward in trajectory)) for trajectory in trajectories]
        for trajectories in _groups(samples, rewards)
    ]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _share(flags: Iterable[bool]) -> float:
    values = list(flags)
    return sum(values) / len(values)


def request_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return statistics of the engine calls in the samples' traces: ``perf/request/*``, ``perf/decode/throughput/*``
    and, of engines that report the phases, ``perf/{prefill,decode}/time/*`` in seconds."""
    values: dict[str, list[float]] = {}
    for sample in samples:
        trace = getattr(sample, "trace", None)
        started: dict[Any, float] = {}
        for event in trace.get("events", []) if isinstance(trace, Mapping) else []:
            name = _PHASES.get(event.get("name"))
            if name and event.get("type") == "span_start":
                started[event.get("span_id")] = event["ts"]
            elif name and event.get("type") == "span_end" and event.get("span_id") in started:
                values.setdefault(name, []).append(float(event["ts"] - started.pop(event["span_id"])))
            elif event.get("type") == "span_end" and event.get("name") == "sglang_generate":
                for key, name in _REQUEST_ATTRIBUTES.items():
                    value = (event.get("attrs") or {}).get(key)
                    if isinstance(value, (int, float)):
                        values.setdefault(name, []).append(float(value))
    found: dict[str, float] = {}
    for name, measured in values.items():
        found |= statistics(measured, f"perf/{name}/")
    return found


def top_p_metrics(samples: Sequence[Sample], prefix: str = "rollout/") -> dict[str, float]:
    """Return ``<prefix>top_p_kept_vocab_per_token``: the mean size of the top-p mask of a trained token."""
    kept = tokens = 0
    for sample in samples:
        if sample.rollout_top_p_token_offsets is None or sample.remove_sample:
            continue
        sizes = np.diff(np.asarray(sample.rollout_top_p_token_offsets))
        trained = np.ones(len(sizes), bool) if sample.loss_mask is None else np.asarray(sample.loss_mask) != 0
        kept += int(sizes[trained].sum())
        tokens += int(trained.sum())
    return {f"{prefix}top_p_kept_vocab_per_token": kept / tokens} if tokens else {}


def staleness_metrics(samples: Sequence[Sample], rollout_id: int) -> dict[str, float]:
    """Return ``rollout/staleness/*``: by how many training steps trained tokens lag behind rollout ``rollout_id``.

    ``mean``, ``max`` and the nearest-rank ``p99`` over tokens whose version is known, and the share of each lag
    (``lag_<k>``; the last one holds all from ``MAX_LAG_SHOWN`` on).
    """
    counts: Counter[int] = Counter()
    for sample in (sample for sample in samples if not sample.remove_sample):
        for step, tokens in trained_steps(sample, weight_clock()):
            if step is not None:
                counts[rollout_id - step] += tokens
    total = sum(counts.values())
    if not total:
        return {}
    found = {
        "mean": sum(lag * tokens for lag, tokens in counts.items()) / total,
        "max": float(max(counts)),
        "p99": float(_nearest_rank(counts, 0.99)),
    }
    for lag in range(min(MAX_LAG_SHOWN, max(0, *counts)) + 1):
        tokens = counts[lag] if lag < MAX_LAG_SHOWN else sum(n for k, n in counts.items() if k >= lag)
        found[f"lag_{lag}"] = tokens / total
    return {f"rollout/staleness/{name}": value for name, value in found.items()}


def _nearest_rank(counts: Counter[int], share: float) -> int:
    """Return the smallest value at or below which lies ``share`` of the counted values."""
    rank, seen = math.ceil(share * sum(counts.values())), 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= rank:
            return value
    raise ValueError("nothing was counted")


CONSTANT_ROLLOUTS = 3
"""So many rollouts in a row with one constant reward are not chance."""


class ConstantRewards:
    """Warns once when rewards are constant over several rollouts, unless the loss has other inputs than rewards."""

    def __init__(self, args: Args) -> None:
        self.args = args
        self._value: float | None = None
        self._in_a_row = self._samples = 0
        other_loss = args.use_opd or args.loss_type != "policy_loss"
        own = args.custom_reward_post_process_path or args.custom_convert_samples_to_train_data_path
        self._watches = not other_loss and not own

    def check(self, rollout_id: int, samples: Sequence[Sample]) -> None:
        """Check the rewards of a rollout, without those of samples that are removed from the loss."""
        if not self._watches:
            return
        key = self.args.reward_key
        rewards = [sample.reward for sample in samples if not sample.remove_sample]
        if key:
            rewards = [reward.get(key) if isinstance(reward, Mapping) else None for reward in rewards]
        found = {float(reward) if isinstance(reward, numbers.Real) else None for reward in rewards}
        value = found.pop() if len(found) == 1 else None
        if value is None or value != self._value:
            self._in_a_row = self._samples = 0
        self._value = value
        if value is None:
            return
        self._in_a_row += 1
        self._samples += len(rewards)
        if self._in_a_row == CONSTANT_ROLLOUTS:
            self._watches = False
            path, kind = self.args.custom_rm_path, self.args.rm_type
            source = f"--rm-type {kind}" if kind else 'metadata["rm_type"]'
            logger.warning(
                "the reward of all %d samples of rollouts %d to %d is %g: from equal rewards nothing is learned. Look "
                "at responses and labels in %s/samples, and at the reward (%s)",
                self._samples, rollout_id - CONSTANT_ROLLOUTS + 1, rollout_id, value, self.args.run_dir,
                f"--custom-rm-path {path}" if path else source,
            )  # fmt: skip

"""A hook of every kind, each as short as it can be."""

from __future__ import annotations

from typing import Any

from slime.observability.logging_utils import log
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, iter_samples
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.sglang_rollout import GenerateState, eval_rollout, generate, generate_and_rm_group
from slime.utils.types import Sample


async def rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """``--rollout-function-path`` as a coroutine function: group after group."""
    if evaluation:
        return (await eval_rollout(args, rollout_id))[0]
    params = GenerateState(args).sampling_params
    groups = data_source.get_samples(args.rollout_batch_size)
    done = [await generate_and_rm_group(args, group, params.copy()) for group in groups]
    return RolloutFnTrainOutput(done, {"rollout/groups": len(done)})


def constant_evaluation(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> RolloutFnEvalOutput:
    """``--eval-function-path`` that measures something else."""
    return RolloutFnEvalOutput({"steps": {"rewards": [float(rollout_id)]}}, {"eval/rollouts": rollout_id})


async def two_turns(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    """``--custom-generate-function-path``: an answer, a word of the environment, another answer."""
    await generate(args, sample, {**sampling_params, "max_new_tokens": 4})
    note = GenerateState(args).tokenizer.encode("!", add_special_tokens=False)
    sample.append_response_tokens(args, tokens=note, text="!", trainable=False)
    sample.status = Sample.Status.PENDING
    return await generate(args, sample, sampling_params)


async def fan_out(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Any]:
    """``--custom-generate-function-path``: samples of one trajectory, nested, that share its rollout id."""
    sample.rollout_id = sample.index
    other = Sample(**sample.__dict__)
    other.tokens, other.metadata = list(sample.tokens), dict(sample.metadata)
    return [await generate(args, sample, sampling_params), [await generate(args, other, sampling_params)]]


def plain_generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """``--custom-generate-function-path`` that is no coroutine function."""
    sample.tokens, sample.response, sample.response_length = [1, 2, 3], "ab", 2
    sample.rollout_log_probs, sample.loss_mask = [-0.1, -0.2], [1, 1]
    sample.status = Sample.Status.COMPLETED
    return sample


def note_rollout(args: Any, sample: Sample, *, rollout_id: int | None = None) -> None:
    """``--rollout-sample-hook-path`` that changes the sample it is given."""
    sample.metadata["rollout"] = rollout_id


async def replace_sample(args: Any, sample: Sample, **kwargs: Any) -> Sample:
    """``--rollout-sample-hook-path`` that continues with another sample."""
    return Sample(**{**sample.__dict__, "response": sample.response.upper()})


async def length_reward(args: Any, sample: Any, **kwargs: Any) -> Any:
    """``--custom-rm-path`` in both of its forms."""
    if isinstance(sample, list):
        return [float(one.response_length) for one in sample]
    return float(sample.response_length)


def plain_reward(args: Any, sample: Any, **kwargs: Any) -> Any:
    """``--custom-rm-path`` that is no coroutine function."""
    return [0.5] * len(sample) if isinstance(sample, list) else 0.5


def not_too_easy(args: Any, group: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """``--dynamic-sampling-filter-path``."""
    rewards = [float(sample.get_reward_value(args)) for sample in iter_samples(group)]
    return DynamicFilterOutput(keep=sum(rewards) < 0.9 * len(rewards), reason="too_easy")


def newest_first(args: Any, rollout_id: None, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
    """``--buffer-filter-path``."""
    return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]


def drop_truncated(args: Any, groups: list[list[Sample]]) -> None:
    """``--rollout-sample-filter-path``."""
    for sample in iter_samples(groups):
        sample.remove_sample = sample.status == Sample.Status.TRUNCATED


def count_groups(args: Any, all_groups: list[list[Sample]], get_samples: Any) -> None:
    """``--rollout-all-samples-process-path``."""
    args.groups_seen = getattr(args, "groups_seen", 0) + len(all_groups)


def log_rollout(
    rollout_id: int, args: Any, samples: list[Sample], rollout_extra_metrics: Any, rollout_time: float
) -> bool:
    """``--custom-rollout-log-function-path``, besides the built-in metrics."""
    log(args, {"rollout/samples": len(samples), "rollout/step": rollout_id}, "rollout/step")
    return False


def log_evaluation(rollout_id: int, args: Any, data: dict[str, Any], extra_metrics: Any) -> bool:
    """``--custom-eval-rollout-log-function-path``, in place of the built-in metrics."""
    log(args, {"eval/data_sets": len(data), "eval/step": rollout_id}, "eval/step")
    return True


def centered_rewards(args: Any, samples: list[Sample]) -> tuple[list[Any], list[float]]:
    """``--custom-reward-post-process-path``: relative to all samples of the rollout."""
    raw = [float(sample.get_reward_value(args)) for sample in samples]
    return raw, [reward - sum(raw) / len(raw) for reward in raw]


def convert(args: Any, samples: list[Sample]) -> dict[str, list[Any]]:
    """``--custom-convert-samples-to-train-data-path`` with the required keys only."""
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [float(sample.get_reward_value(args)) for sample in samples],
        "loss_masks": [sample.loss_mask or [1] * sample.response_length for sample in samples],
    }


def clip_advantages(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """``--rollout-data-postprocess-path``."""
    rollout_data["advantages"] = [values.clamp(-1, 1) for values in rollout_data["advantages"]]

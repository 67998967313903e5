"""Plugins as other projects have written them for slime <= 0.3.1: one for each kind of extension point.

They import the paths that such plugins import, the older ones too, and take arguments under the names they had there.
"""

from __future__ import annotations

import asyncio
import copy
import uuid
from dataclasses import dataclass
from typing import Any

import torch
from aiohttp import web

from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.backends.megatron_utils.train.cp_utils import all_gather_with_cp, slice_log_prob_with_cp
from slime.backends.megatron_utils.train.loss import get_log_probs_and_entropy, vanilla_tis_function
from slime.observability.metric_utils import compute_rollout_step, compute_statistics, dict_add_prefix
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn
from slime.rollout.data_source import DataSource, RolloutDataSourceWithBuffer, pop_first
from slime.rollout.filter_hub.base_types import DynamicFilterOutput, MetricGatherer, call_dynamic_filter
from slime.rollout.filter_hub.dynamic_sampling_filters import check_reward_nonzero_std
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.rm_hub.f1 import f1_score
from slime.rollout.rm_hub.math_utils import extract_answer, grade_answer_verl
from slime.rollout.sglang_rollout import (
    GenerateState,
    abort,
    eval_rollout,
    generate,
    generate_and_rm,
    get_model_url,
)
from slime.servers.http_utils import post
from slime.utils.async_utils import run
from slime.utils.logging_utils import log
from slime.utils.misc import SingletonMeta, load_function
from slime.utils.ppo_utils import compute_approx_kl, compute_policy_loss
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.generator.base_generator import BaseGenerator

SEEN: dict[str, list[Any]] = {}
"""Arguments of plugins that return nothing, by kind."""


def note(kind: str, *values: Any) -> None:
    SEEN.setdefault(kind, []).append(values)


# Rollout functions


async def _fill(args: Any, rollout_id: int, get_samples: Any) -> tuple[list[list[Sample]], dict[str, Any]]:
    """The loop of slime's own rollout function, as projects have copied and changed it."""
    state = GenerateState(args)
    keep = load_function(args.dynamic_sampling_filter_path) if args.dynamic_sampling_filter_path else None
    metrics, data = MetricGatherer(), []
    while len(data) < args.rollout_batch_size:
        while state.remaining_batch_size < args.rollout_batch_size:
            state.submit_generate_tasks(get_samples(args.over_sampling_batch_size))
        done, state.pendings = await asyncio.wait(state.pendings, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            group = task.result()
            output = call_dynamic_filter(keep, args, group)
            if not output.keep:
                metrics.on_dynamic_filter_drop(reason=output.reason)
                state.remaining_batch_size -= 1
            elif len(data) < args.rollout_batch_size:
                data.append(group)
    await abort(args, rollout_id)
    state.reset()
    return sorted(data, key=lambda group: group[0].index), metrics.collect()


def rollout(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
    """``--rollout-function-path`` with a loop of its own."""
    if evaluation:
        output, _ = run(eval_rollout(args, rollout_id))
        return output
    samples, metrics = run(_fill(args, rollout_id, data_buffer.get_samples))
    return RolloutFnTrainOutput(samples=samples, metrics=metrics)


def legacy_rollout(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
    """``--rollout-function-path`` from the time when it returned a list, or a dict for evaluations."""
    if evaluation:
        return {"mine": {"rewards": [1.0, 0.0], "truncated": [False, True], "samples": []}}
    groups = data_buffer.get_samples(args.rollout_batch_size)

    async def all_of_them() -> list[list[Sample]]:
        params = {"temperature": args.rollout_temperature, "max_new_tokens": args.rollout_max_response_len}
        return [
            await asyncio.gather(*(generate_and_rm(args, sample, params.copy(), evaluation=False) for sample in group))
            for group in groups
        ]

    return run(all_of_them())


def evaluate(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> RolloutFnEvalOutput:
    """``--eval-function-path`` that wraps another rollout function and adds a data set of its own."""
    assert evaluation
    output = call_rollout_fn(legacy_rollout, args, rollout_id, data_source, evaluation=True)
    return RolloutFnEvalOutput(data={**output.data, "more": {"rewards": [0.5], "truncated": [False]}}, metrics={"x": 1})


class Proxy(metaclass=SingletonMeta):
    """An address that speaks OpenAI's API; what goes through it becomes samples."""

    def __init__(self, args: Any) -> None:
        self.args = args
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.complete)
        self.handle = run_app_in_thread(app, host="127.0.0.1", port=0)
        self.finished: list[Sample] = []

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        tokenizer = GenerateState(self.args).tokenizer
        text = tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
        prompt_ids = tokenizer.encode(text, add_special_tokens=False)
        payload = {"input_ids": prompt_ids, "sampling_params": {"max_new_tokens": 8}, "return_logprob": True}
        output = await post(get_model_url(self.args, "default"), payload)
        pairs = output["meta_info"]["output_token_logprobs"]
        sample = Sample(prompt=text, tokens=prompt_ids + [item[1] for item in pairs], response=output["text"])
        sample.response_length, sample.rollout_log_probs = len(pairs), [item[0] for item in pairs]
        sample.status, sample.reward = Sample.Status.COMPLETED, float(len(pairs))
        self.finished.append(sample)
        message = {"role": "assistant", "content": output["text"]}
        return web.json_response({"id": uuid.uuid4().hex, "choices": [{"index": 0, "message": message}]})


def proxied_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> RolloutFnTrainOutput:
    """``--rollout-function-path`` that trains on what has gone through the proxy."""
    proxy = Proxy(args)
    count = args.rollout_batch_size * args.n_samples_per_prompt
    samples, proxy.finished = proxy.finished[:count], proxy.finished[count:]
    for index, sample in enumerate(samples):
        sample.index, sample.group_index = index, index // args.n_samples_per_prompt
    groups = [samples[i : i + args.n_samples_per_prompt] for i in range(0, len(samples), args.n_samples_per_prompt)]
    return RolloutFnTrainOutput(samples=groups)


# Generation


async def with_tool(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """``--custom-generate-function-path`` of several turns, with requests of its own and masks by hand."""
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    response_ids: list[int] = []
    loss_mask: list[int] = []
    log_probs: list[float] = []
    response = ""
    for turn in range(2):
        payload = {"input_ids": prompt_ids + response_ids, "sampling_params": sampling_params, "return_logprob": True}
        output = await post(url, payload)
        if output["meta_info"]["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        new = [item[1] for item in output["meta_info"]["output_token_logprobs"]]
        response_ids += new
        log_probs += [item[0] for item in output["meta_info"]["output_token_logprobs"]]
        loss_mask += [1] * len(new)
        response += output["text"]
        if turn == 0:
            observation = "<result>4</result>"
            ids = state.tokenizer.encode(observation, add_special_tokens=False)
            response_ids, loss_mask, log_probs = (
                response_ids + ids,
                loss_mask + [0] * len(ids),
                log_probs + [0.0] * len(ids),
            )
            response += observation
    sample.tokens = prompt_ids + response_ids
    sample.response_length = len(response_ids)
    sample.response = response
    sample.loss_mask = loss_mask
    sample.rollout_log_probs = log_probs
    sample.tool_call_count = 1  # read by the reward
    match output["meta_info"]["finish_reason"]["type"]:
        case "length":
            sample.status = Sample.Status.TRUNCATED
        case "abort":
            sample.status = Sample.Status.ABORTED
        case "stop":
            sample.status = Sample.Status.COMPLETED
    return sample


async def solvers(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """``--custom-generate-function-path``: several agents, each with a sample; one in an evaluation."""
    if evaluation:
        return await generate(args, sample, sampling_params)
    args.solver_calls = getattr(args, "solver_calls", 0) + 1
    agents = [copy.deepcopy(sample) for _ in range(3)]
    done = await asyncio.gather(*(generate(args, agent, sampling_params.copy()) for agent in agents))
    rewards = await batched_async_rm(args, done)
    for agent, reward in zip(done, rewards, strict=True):
        agent.reward, agent.rollout_id = reward, sample.index
        agent.session_id = None
    return [done[0], done[1:]]


async def group_at_once(
    args: Any, group: list[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> Any:
    """In the place of ``slime.rollout.sglang_rollout.generate_and_rm_group``: a group in one go."""
    await asyncio.gather(*(generate(args, sample, sampling_params.copy()) for sample in group))
    for sample, reward in zip(group, await batched_async_rm(args, group), strict=True):
        sample.reward = reward
    return group


async def route_to_judge(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """``--custom-generate-function-path``: the answer is read by a second model with a router of its own."""
    await generate(args, sample, sampling_params)
    payload = {"text": sample.response, "sampling_params": {"max_new_tokens": 1}}
    verdict = await post(get_model_url(args, "judge"), payload)
    sample.metadata["verdict"] = verdict["text"]
    return sample


def mark(args: Any, sample: Sample, *, rollout_id: int | None = None, **kwargs: Any) -> Sample:
    """``--rollout-sample-hook-path``."""
    sample.metadata["seen_by_hook"] = rollout_id
    return sample


# Rewards


async def reward(args: Any, sample: Sample, **kwargs: Any) -> dict[str, float]:
    """``--custom-rm-path`` with an object, for ``--reward-key``."""
    score = float(sample.response_length) - 0.1 * getattr(sample, "tool_call_count", 0)
    return {"score": score, "acc": float(score > 0)}


async def group_reward(args: Any, samples: list[Sample], **kwargs: Any) -> list[float]:
    """``--custom-rm-path`` of a group: ranks."""
    order = sorted(range(len(samples)), key=lambda i: samples[i].response_length)
    return [float(order.index(i)) for i in range(len(samples))]


async def reward_by_kind(args: Any, sample: Sample, **kwargs: Any) -> float:
    """``--custom-rm-path`` that asks slime's own rules, by the sample's metadata."""
    if isinstance(sample, list):
        return [await reward_by_kind(args, one) for one in sample]
    kind = (sample.metadata or {}).get("kind")
    if kind == "math":
        return float(grade_answer_verl(sample.response, sample.label))
    if kind == "box":
        return float(extract_answer(sample.response) == sample.label)
    if kind == "words":
        return f1_score(sample.response, sample.label)[0]
    plain = copy.deepcopy(sample)
    plain.metadata, rules = {}, copy.copy(args)
    rules.custom_rm_path = None
    return await async_rm(rules, plain)


def post_process(args: Any, samples: list[Sample], **kwargs: Any) -> tuple[list[float], list[float]]:
    """``--custom-reward-post-process-path``: per group, leave-one-out."""
    raw = [sample.get_reward_value(args) for sample in samples]
    rewards = torch.tensor(raw, dtype=torch.float).view(-1, args.n_samples_per_prompt)
    n = rewards.size(1)
    baseline = (rewards.sum(1, keepdim=True) - rewards) / (n - 1)
    return raw, (rewards - baseline).flatten().tolist()


def convert(args: Any, samples: list[Sample]) -> dict[str, Any]:
    """``--custom-convert-samples-to-train-data-path``: turns of an execution are rows, with keys of its own."""
    data: dict[str, Any] = {
        "tokens": [], "response_lengths": [], "rewards": [], "raw_reward": [], "truncated": [], "loss_masks": [],
        "rollout_ids": [], "sample_indices": [], "rollout_log_probs": [], "turn": [],
    }  # fmt: skip
    for sample in samples:
        turns = (sample.train_metadata or {}).get("turns") or [sample.__dict__]
        for number, turn in enumerate(turns):
            data["tokens"].append(turn["tokens"])
            data["response_lengths"].append(turn["response_length"])
            data["rewards"].append(sample.get_reward_value(args) / len(turns))
            data["raw_reward"].append(sample.get_reward_value(args))
            data["truncated"].append(1 if sample.status == Sample.Status.TRUNCATED else 0)
            data["loss_masks"].append(turn["loss_mask"] or [1] * turn["response_length"])
            data["rollout_ids"].append(sample.index)
            data["sample_indices"].append(sample.index)
            data["rollout_log_probs"].append(turn["rollout_log_probs"])
            data["turn"].append(number)
    return data


# Filters and data


def keep_mixed(args: Any, samples: list[Sample], **kwargs: Any) -> Any:
    """``--dynamic-sampling-filter-path`` around slime's own."""
    if all(sample.status == Sample.Status.TRUNCATED for sample in samples):
        return DynamicFilterOutput(keep=False, reason="all_truncated")
    return check_reward_nonzero_std(args, samples, **kwargs)


def keep_even(args: Any, samples: list[Sample]) -> bool:
    """``--dynamic-sampling-filter-path`` from the time when it returned a bool."""
    return samples[0].group_index % 2 == 0


def youngest(args: Any, rollout_id: int, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
    """``--buffer-filter-path``: the latest first."""
    buffer.sort(key=lambda group: -group[0].index)
    return pop_first(args, rollout_id, buffer, num_samples)


def drop_long(args: Any, samples: list[list[Sample]]) -> None:
    """``--rollout-sample-filter-path``."""
    for group in samples:
        for sample in group:
            sample.remove_sample = sample.response_length > 3


def keep_all(args: Any, all_samples: list[list[Sample]], data_source: Any) -> None:
    """``--rollout-all-samples-process-path``."""
    note("all_samples", len(all_samples), callable(data_source))


@dataclass
class TreeSample(Sample):
    """A sample with fields of its own."""

    parent: int | None = None


class Curriculum(RolloutDataSourceWithBuffer):
    """``--data-source-path``: easy prompts first, at levels that are kept in the saved metadata."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.dataset.samples.sort(key=lambda sample: len(sample.prompt))

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        groups = super().get_samples(num_samples)
        level = self.get_metadata().get("level", 0)
        for group in groups:
            for sample in group:
                sample.metadata = {**(sample.metadata or {}), "level": level}
        self.update_metadata({"level": level + 1})
        return groups


class Generated(DataSource):
    """``--data-source-path`` without a file: tasks are made up."""

    def __init__(self, args: Any) -> None:
        self.args, self.count, self.returned = args, 0, []

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        groups = []
        for _ in range(num_samples):
            group = []
            for n in range(self.args.n_samples_per_prompt):
                sample = TreeSample(prompt=f"{self.count}+1=", label=str(self.count + 1), parent=n)
                sample.group_index, sample.index = self.count, self.count * self.args.n_samples_per_prompt + n
                group.append(sample)
            groups.append(group)
            self.count += 1
        return groups

    def add_samples(self, samples: list[list[Sample]]) -> None:
        self.returned += samples

    def save(self, rollout_id: int) -> None:
        note("save", rollout_id)

    def load(self, rollout_id: int | None = None) -> None:
        note("load", rollout_id)

    def __len__(self) -> int:
        return 1_000_000


# Logging


def log_rollout(
    rollout_id: int, args: Any, samples: list[Sample], rollout_extra_metrics: Any, rollout_time: float
) -> bool:
    """``--custom-rollout-log-function-path`` in the place of the built-in metrics."""
    lengths = [sample.effective_response_length for sample in samples]
    metrics = dict_add_prefix(compute_statistics(lengths), "rollout/mine/")
    metrics |= {"rollout/time": rollout_time, **(rollout_extra_metrics or {})}
    metrics["rollout/step"] = compute_rollout_step(args, rollout_id)
    log(args, metrics, step_key="rollout/step")
    return True


def log_eval(rollout_id: int, args: Any, data: dict[str, Any], extra_metrics: Any) -> bool:
    """``--custom-eval-rollout-log-function-path`` besides the built-in metrics."""
    best = {f"eval/{name}/best": max(found["rewards"]) for name, found in data.items()}
    log(args, {**best, "eval/step": compute_rollout_step(args, rollout_id)}, step_key="eval/step")
    return False


# The trainer


def policy_loss(args: Any, batch: dict[str, Any], logits: torch.Tensor, sum_of_sample_mean: Any) -> Any:
    """``--custom-loss-function-path``: clipped policy gradient, with a KL term against the old policy."""
    _, found = get_log_probs_and_entropy(
        logits, args=args, unconcat_tokens=batch["unconcat_tokens"], total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"], with_entropy=True,
    )  # fmt: skip
    log_probs, old = torch.cat(found["log_probs"]), torch.cat(batch["log_probs"])
    pg_loss, clipped = compute_policy_loss(
        old - log_probs, torch.cat(batch["advantages"]), args.eps_clip, args.eps_clip_high
    )
    kl = compute_approx_kl(log_probs, old, kl_loss_type="low_var_kl")
    loss = sum_of_sample_mean(pg_loss) + 0.1 * sum_of_sample_mean(kl)
    return loss, {"loss": loss.clone().detach(), "pg_clipfrac": sum_of_sample_mean(clipped).clone().detach()}


def advantages(args: Any, rollout_data: dict[str, Any]) -> None:
    """``--custom-advantage-function-path``: the reward on the last token, discounted backwards."""
    result = []
    for value, mask, kl in zip(rollout_data["rewards"], rollout_data["loss_masks"], rollout_data["kl"], strict=True):
        steps = torch.arange(len(kl) - 1, -1, -1, dtype=torch.float)
        result.append(value * 0.9**steps * torch.as_tensor(mask, dtype=torch.float))
    rollout_data["advantages"] = rollout_data["returns"] = result


def postprocess(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """``--rollout-data-postprocess-path``: leave out tokens on which engine and trainer disagree."""
    for mask, train, engine in zip(
        rollout_data["loss_masks"], rollout_data["log_probs"], rollout_data["rollout_log_probs"], strict=True
    ):
        mask *= ((train - engine).abs() < 1.0).to(mask.dtype)


def weights(args: Any, *, pg_loss: torch.Tensor, loss_masks: list[torch.Tensor], **kwargs: Any) -> Any:
    """``--custom-tis-function-path``: slime's own, and sequences without weight where whole ratios are large."""
    loss, masks, metrics = vanilla_tis_function(args, pg_loss=pg_loss, loss_masks=loss_masks, **kwargs)
    kept = []
    for i, mask in enumerate(masks):
        lengths = kwargs["total_lengths"][i], kwargs["response_lengths"][i]
        ratio = all_gather_with_cp(kwargs["train_log_probs"][i] - kwargs["rollout_log_probs"][i], *lengths).exp()
        kept.append(mask * float(ratio.max() < 50))
    metrics["mine"] = torch.cat(
        [slice_log_prob_with_cp(m.float(), t, r)
         for m, t, r in zip(kept, kwargs["total_lengths"], kwargs["response_lengths"], strict=True)]
    )  # fmt: skip
    return loss, kept, metrics


def reducer(total_lengths: Any, response_lengths: Any, loss_masks: Any, calculate_per_token_loss: bool = False) -> Any:
    """``--custom-pg-loss-reducer-function-path``: a constant in the place of the length."""

    def reduce(x: torch.Tensor) -> torch.Tensor:
        parts = x.split(list(response_lengths))
        return sum((part * mask).sum() / 100.0 for part, mask in zip(parts, loss_masks, strict=True))

    return reduce


def megatron_init(args: Any) -> None:
    """``--custom-megatron-init-path``."""
    note("init", args)


def before_log_prob(args: Any, model: Any, store_prefix: str) -> None:
    """``--custom-megatron-before-log-prob-hook-path``."""
    note("log_prob", store_prefix)


def before_train_step(
    args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, opt_param_scheduler: Any
) -> None:
    """``--custom-megatron-before-train-step-hook-path``."""
    note("step", rollout_id, step_id)


def post_write(args: Any, version_dir: str, rollout_engines: Any) -> None:
    """``--custom-update-weight-post-write-path``."""
    note("written", version_dir, len(rollout_engines))


# Around a run


def add_arguments(parser: Any) -> Any:
    """``parse_args(add_custom_arguments=...)``."""
    parser.add_argument("--third-party-depth", type=int, default=3)
    return parser


class Essays(BaseGenerator):
    """A generator for the rollout buffer, which keeps what it sends."""

    sent: list[dict[str, Any]]

    def send_data_to_buffer(self, data: dict[str, Any]) -> None:
        self.sent = [*getattr(self, "sent", []), data]

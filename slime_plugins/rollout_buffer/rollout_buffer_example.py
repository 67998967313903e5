"""The rollout function of runs whose trajectories come from a rollout buffer (``--rollout-function-path``)."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slime.arguments.args import Args
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.sft_rollout import mask_generator
from slime.servers.http_client import HttpClient, HttpRequestError
from slime.servers.key_file import key_for
from slime.utils.async_utils import run
from slime.utils.image_tokens import PIXELS_OF_PROCESSOR
from slime.utils.images import reopen_image
from slime.utils.mask_utils import MultiTurnLossMaskGenerator, get_response_lengths
from slime.utils.moved import also_named
from slime.utils.network import join_address
from slime.utils.types import Sample, iter_samples
from slime_plugins.rollout_buffer.trajectory_checks import ItemError, check_item, has_log_probs

if TYPE_CHECKING:
    from slime.rollout.data_source import RolloutDataSourceWithBuffer

__all__ = ["generate_rollout"]

logger = logging.getLogger(__name__)

WAIT_S = 30.0
"""Seconds that one request may wait at the buffer for a group."""
MOST_BAD_GROUPS = 1000
"""So many groups in a row that cannot be trained on are the generator's fault, and end the run."""
MAX_EMPTY_RUNS = 1
"""Runs of a generator in a row that may end without a group: all that was left to generate may be invalid."""
COUNTER = "rollout_buffer_groups"
RECORDED = (
    "tokens", "response", "response_length", "loss_mask", "rollout_log_probs", "weight_versions",
    "weight_version_spans", "agent_session",
)  # fmt: skip
"""Fields that are taken over from the ``samples`` of a trajectory that came with its tokens."""
Group = list[Any]
"""The trajectories of a group: a sample each, or a list of several with one ``rollout_id``."""


@dataclass
class Progress:
    """The progress of this process with a buffer whose generator it has started.

    Attributes:
        arrived: ``batch_id`` of the last batch since the generator was started.
        extra_epochs: how many more epochs than planned it takes, because groups were dropped.
        empty_runs: runs of the generator in a row that ended without a group.
    """

    arrived: int | None = None
    extra_epochs: int = 0
    empty_runs: int = 0


_started: dict[str, Progress] = {}


@also_named(data_buffer="data_source")
def generate_rollout(
    args: Args, rollout_id: int, data_source: RolloutDataSourceWithBuffer, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """Return ``rollout_batch_size`` groups from the buffer at ``--rollout-buffer-url``.

    The first call starts the generator of ``--rollout-task-type``. Groups beyond those asked for wait in the data
    source, and which items have been fetched is part of its state: after a restart the generator leaves them out. One
    that ends with too few groups goes through the prompts once more. Raises RuntimeError when that brings nothing, when
    the generator fails, or after ``--fetch-trajectory-retry-times`` fetches in a row without a group, and ValueError
    for evaluations, which the buffer does not make.
    """
    if evaluation:
        raise ValueError(
            "the rollout buffer makes no evaluations: give --eval-function-path "
            "slime.rollout.sglang_rollout.generate_rollout, or leave out --eval-interval"
        )
    if not args.rollout_buffer_url:
        raise ValueError(f"{__name__}.generate_rollout needs --rollout-buffer-url, the address of the rollout buffer")
    if not hasattr(data_source, "get_buffer_length"):
        raise ValueError(
            f"{type(data_source).__name__} keeps no groups for later rollouts; leave out --data-source-path, or use "
            "slime.rollout.data_source.RolloutDataSourceWithBuffer"
        )
    return run(_generate_rollout(args, rollout_id, data_source, args.rollout_buffer_url.rstrip("/")))


async def _generate_rollout(
    args: Args, rollout_id: int, data_source: RolloutDataSourceWithBuffer, url: str
) -> RolloutFnTrainOutput:
    client = HttpClient(4, args.rollout_request_timeout, key_for(url))
    client.trust(url)
    wanted = args.rollout_batch_size
    groups: list[Group] = []
    meta_infos: list[dict[str, Any]] = []
    try:
        if url not in _started:
            await _start(args, client, url, data_source)
        groups += data_source.get_samples(min(wanted, data_source.get_buffer_length()))
        empty = bad = in_a_row = 0
        while len(groups) < wanted:
            items, meta_info = await _fetch(args, client, url, empty)
            if (meta_info.get("generator") or {}).get("state") == "none":
                # generators that it started before its restart may still write, to groups of any size
                logger.warning(
                    "the rollout buffer at %s was restarted: what had not been fetched is generated again, and %d "
                    "trajectories that reached it before are dropped", url, len(items),
                )  # fmt: skip
                await _start(args, client, url, data_source)
                continue
            empty = 0 if items else empty + 1
            fetched = _groups(args, items, data_source)
            _remember(data_source, rollout_id, fetched)
            groups += fetched.groups
            bad, in_a_row = bad + len(fetched.bad), 0 if fetched.groups else in_a_row + len(fetched.bad)
            if in_a_row > MOST_BAD_GROUPS:
                raise RuntimeError(f"{in_a_row} groups in a row cannot be trained on; the last one: {fetched.bad[-1]}")
            if items:
                meta_infos.append(meta_info)
            elif len(groups) < wanted:
                await _check_generator(args, client, url, data_source, meta_info, len(groups))
    except BaseException:
        data_source.add_samples(groups)  # they count as fetched
        raise
    finally:
        await client.close()
    if groups[wanted:]:
        data_source.add_samples(groups[wanted:])
    samples = _with_alike_log_probs(groups[:wanted])
    metrics = {**_metrics(samples, meta_infos), "rollout/buffer/bad_groups": bad}
    return RolloutFnTrainOutput(samples=samples, metrics=metrics)


async def _start(args: Args, client: HttpClient, url: str, data_source: RolloutDataSourceWithBuffer) -> None:
    fetched = data_source.get_metadata().get("rollout_buffer_fetched", {})
    progress = _started.get(url, Progress())
    payload = {
        "task_type": args.rollout_task_type,
        "input_file": args.prompt_data,
        "input_key": args.input_key,
        "label_key": args.label_key,
        "num_epoch": _epochs(args, data_source) + progress.extra_epochs,
        "num_process": getattr(args, "rollout_num_process", None) or 10,  # of --custom-config-path
        "num_repeat_per_sample": args.n_samples_per_prompt,
        "remote_engine_url": f"http://{join_address(args.sglang_router_ip, args.sglang_router_port)}",
        "remote_buffer_url": url,
        "vocab_size": args.vocab_size,
        "reward_key": args.reward_key,
        "max_tokens": args.rollout_max_response_len,
        "sampling_params": {
            "max_tokens": args.rollout_max_response_len,
            "temperature": args.rollout_temperature,
            "top_p": args.rollout_top_p,
        },
        "tokenizer_path": args.hf_checkpoint,
        "skip_instance_ids": [name for names in fetched.values() for name in names],
    }
    if args.sglang_api_key:
        payload["engine_api_key"] = args.sglang_api_key
    reply = await client.post(f"{url}/start_rollout", payload, max_retries=10)
    logger.info("rollout buffer %s: %s", url, reply)
    progress.arrived = None
    _started[url] = progress


def _epochs(args: Args, data_source: RolloutDataSourceWithBuffer) -> int:
    """Return how often the generator goes through the prompts: as often as the run needs them."""
    if args.num_rollout is None or not len(data_source):
        return args.num_epoch or 1
    return math.ceil(args.num_rollout * args.rollout_batch_size / len(data_source))


async def _fetch(args: Args, client: HttpClient, url: str, empty: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the trajectories of the groups that are ready; the request itself waits for the first of them."""
    tries = args.fetch_trajectory_retry_times
    if tries >= 0 and empty > tries:
        raise RuntimeError(
            f"the rollout buffer at {url} had no group for {empty} requests in a row, each of {WAIT_S:g} s "
            f"(--fetch-trajectory-retry-times {tries})"
        )
    asked = {"wait_s": WAIT_S, "acknowledged": _started[url].arrived}
    try:
        reply = await client.post(f"{url}/get_rollout_data", asked, max_retries=1 if tries >= 0 else 60)
    except HttpRequestError as e:
        if tries < 0 or (e.status is not None and e.status < 500):
            raise
        logger.warning("%s", e)
        return [], {}
    items, meta_info = reply["data"]["data"], reply["data"]["meta_info"] or {}
    if items:
        _started[url].arrived = meta_info.get("batch_id")
    return items, meta_info


async def _check_generator(
    args: Args,
    client: HttpClient,
    url: str,
    data_source: RolloutDataSourceWithBuffer,
    meta_info: dict[str, Any],
    have: int,
) -> None:
    """Raise when nothing more is going to come. A generator that got to its end begins another epoch."""
    generator = meta_info.get("generator") or {"state": "running"}
    if generator["state"] == "running":
        return
    if generator["state"] == "ended" and args.num_rollout is not None:
        progress = _started[url]
        progress.empty_runs = 0 if progress.arrived is not None else progress.empty_runs + 1
        if progress.empty_runs <= MAX_EMPTY_RUNS:
            progress.extra_epochs += 1
            logger.warning(
                "the generator of --rollout-task-type %s has ended with %d groups of %d (%d were not valid): it goes "
                "through the prompts once more",
                args.rollout_task_type, have, args.rollout_batch_size, meta_info.get("invalid_groups", 0),
            )  # fmt: skip
            await _start(args, client, url, data_source)
            return
    said = f", exit code {generator['exit_code']}; its log ends: {generator['log']}" if "log" in generator else ""
    left, groups = meta_info.get("unfinished_items", 0), meta_info.get("unfinished_groups", 0)
    raise RuntimeError(
        f"the generator of --rollout-task-type {args.rollout_task_type} has stopped ({generator['state']}{said}), but "
        f"only {have} of {args.rollout_batch_size} groups are there; {left} trajectories are of {groups} groups that "
        f"are not full, {meta_info.get('invalid_groups', 0)} groups were not valid"
    )


@dataclass
class _Fetched:
    """Result of a batch: the good groups, the ``instance_id`` of every group, and why each bad one is left out."""

    groups: list[Group] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)


def _groups(args: Args, items: Iterable[dict[str, Any]], data_source: RolloutDataSourceWithBuffer) -> _Fetched:
    """Gather the trajectories of one item into groups of ``n_samples_per_prompt``. What is wrong costs its group."""
    size = args.n_samples_per_prompt
    by_instance: dict[str, list[dict[str, Any]]] = {}
    for item in items:
        by_instance.setdefault(str(item["instance_id"]), []).append(item)
    number = int(data_source.get_metadata().get(COUNTER, 0))
    masks = mask_generator(args.hf_checkpoint, args.loss_mask_type, args.trust_remote_code)
    found = _Fetched()
    for instance_id, members in by_instance.items():
        for first in range(0, len(members), size):
            found.names.append(instance_id)
            try:
                found.groups.append(_group(args, members[first : first + size], masks, number + len(found.groups)))
            except Exception as e:  # noqa: BLE001  (the trajectories are those of others)
                found.bad.append(f"group {instance_id}: {e}")
                logger.warning("left out: group %s: %s: %.500s", instance_id, type(e).__name__, e)
    return found


def _group(args: Args, items: list[dict[str, Any]], masks: MultiTurnLossMaskGenerator, group_index: int) -> Group:
    """Return the samples of one group. Raises ValueError, or what its messages make the tokenizer raise."""
    size = args.n_samples_per_prompt
    if len(items) != size:
        raise ValueError(
            f"it has {len(items)} trajectories, expected --n-samples-per-prompt {size}; check transform_group and "
            "is_valid_group of the generator"
        )
    for item in items:
        check_item(item, args.vocab_size, args.reward_key)
        if isinstance(item["reward"], dict) and not (args.reward_key or args.custom_reward_post_process_path):
            raise ItemError(f"reward is an object, which needs --reward-key, got {item['reward']!r:.100}")
    kinds = {has_log_probs(item) for item in items} - {None}
    if len(kinds) > 1 or (False in kinds and _needs_log_probs(args)):
        raise ItemError("samples lack rollout_log_probs, which the others have or a flag of the run needs")
    return [_trajectory(item, masks, group_index, group_index * size + place) for place, item in enumerate(items)]


def _needs_log_probs(args: Args) -> bool:
    return bool(args.use_tis or args.use_rollout_logprobs or args.get_mismatch_metrics)


def _with_alike_log_probs(groups: list[Group]) -> list[Group]:
    """Take the log-probs away where only some of the samples of a rollout have them; no flag of the run needs them."""
    samples = list(iter_samples(groups))
    having = [sample for sample in samples if sample.rollout_log_probs is not None]
    if 0 < len(having) < len(samples):
        logger.warning("%d of %d samples have rollout_log_probs, which are not used", len(having), len(samples))
        for sample in having:
            sample.rollout_log_probs = None
    return groups


def _trajectory(
    item: dict[str, Any], masks: MultiTurnLossMaskGenerator, group_index: int, index: int
) -> Sample | list[Sample]:
    if "samples" not in item:
        return _sample(item, masks, group_index, index)
    if not item["samples"]:  # it failed: out of the loss, with log-probs since the others have them
        sample = _sample(item, masks, group_index, index)
        sample.rollout_log_probs = [0.0] * sample.response_length
        return sample
    samples = []
    for record in item["samples"]:
        flags = record.get("metadata") or {}
        sample = Sample(
            group_index=group_index,
            index=index,
            rollout_id=index,
            prompt=item["messages"][:-1],
            reward=item["reward"],
            status=Sample.Status.TRUNCATED if flags.get("truncated") else Sample.Status.COMPLETED,
            metadata={**item["extra_info"], **flags, "instance_id": item["instance_id"], "uid": item["uid"]},
        )
        for name in RECORDED:
            if record.get(name) is not None:
                setattr(sample, name, record[name])
        if record.get("images"):
            images = [reopen_image(image) for image in record["images"]]
            sample.multimodal_inputs = {"images": images}
            setattr(sample, PIXELS_OF_PROCESSOR, True)  # what the trainer gets of them is made before it trains
        samples.append(sample)
    return samples[0] if len(samples) == 1 else samples


def _sample(item: dict[str, Any], masks: MultiTurnLossMaskGenerator, group_index: int, index: int) -> Sample:
    messages, extra = item["messages"], item["extra_info"]
    tokens, loss_mask = masks.get_loss_mask(messages, tools=extra.get("tools"))
    length = get_response_lengths([loss_mask])[0]
    failed = "error" in extra
    if length == 0 and not failed:
        raise ValueError(f"trajectory {item['uid']} of {item['instance_id']} trains no token: no assistant message")
    status = Sample.Status.TRUNCATED if extra.get("finish_reason") == "length" else Sample.Status.COMPLETED
    last = messages[-1].get("content")
    return Sample(
        group_index=group_index,
        index=index,
        prompt=messages[:-1],
        tokens=tokens,
        response=last if isinstance(last, str) else "",
        response_length=length,
        loss_mask=loss_mask[len(loss_mask) - length :],
        reward=item["reward"],
        status=Sample.Status.FAILED if failed else status,
        remove_sample=failed,
        metadata={**extra, "instance_id": item["instance_id"], "uid": item["uid"]},
    )


def _remember(data_source: RolloutDataSourceWithBuffer, rollout_id: int, found: _Fetched) -> None:
    """Note, in what is saved with a checkpoint, which groups were fetched; those too that are left out."""
    metadata = data_source.get_metadata()
    fetched = dict(metadata.get("rollout_buffer_fetched", {}))
    fetched[str(rollout_id)] = fetched.get(str(rollout_id), []) + sorted(found.names)
    counted = int(metadata.get(COUNTER, 0)) + len(found.groups)
    data_source.update_metadata({"rollout_buffer_fetched": fetched, COUNTER: counted})


def _metrics(groups: list[Group], meta_infos: list[dict[str, Any]]) -> dict[str, Any]:
    failed = sum(sample.remove_sample for sample in iter_samples(groups))
    metrics: dict[str, Any] = {"rollout/buffer/fetches": len(meta_infos), "rollout/buffer/failed_samples": failed}
    for name in ("written_again", "invalid_groups", "unfinished_items"):
        if meta_infos:
            metrics[f"rollout/buffer/{name}"] = meta_infos[-1].get(name, 0)
    return metrics

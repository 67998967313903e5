"""The loop that a command line runs, in sentences, and its batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime.arguments.args import Args
from slime.arguments.groups.rollout import DEFAULT_ROLLOUT, FULLY_ASYNC_ROLLOUT
from slime.arguments.rules.checkpoints import first_weights, needs_reference
from slime.arguments.rules.loop import SFT_ROLLOUT, generates_always
from slime.preflight.plan.format import count, span

Kind = Literal[
    "synchronous",
    "asynchronous",
    "fully asynchronous",
    "rollout only",
    "serving",
    "train only",
    "SFT",
    "replay",
    "evaluation only",
]

SENTENCES: dict[Kind, str] = {
    "synchronous": "train.py: generate, train, take the weights to the engines, one after the other",
    "asynchronous": "train_async.py: while one rollout is trained on, the next is generated with older weights",
    "fully asynchronous": "train_async.py: generation never stops; each rollout takes groups that are ready, made with "
    "weights of several steps",
    "rollout only": "--debug-rollout-only: engines generate, nothing is trained",
    "serving": "no rollouts: engines and routers serve until a signal ends them (slime serve)",
    "train only": "--debug-train-only: no engines; the rollout function makes samples without them",
    "SFT": "supervised fine-tuning on conversations; nothing is generated, no engines",
    "replay": "--load-debug-rollout-data: training on dumps of earlier rollouts, no engines",
    "evaluation only": "--num-rollout 0: the weights go to the engines, and they are evaluated once",
}


@dataclass(frozen=True)
class LoopPlan:
    """The loop and what it does between rollouts, as (what, sentence)."""

    kind: Kind
    rows: tuple[tuple[str, str], ...]


def loop_of(args: Args, *, overlap: bool = False) -> LoopPlan:
    """Return the loop that ``train.py``, or with ``overlap`` ``train_async.py``, runs."""
    kind = _kind(args, overlap)
    sentence = SENTENCES[kind]
    if kind == "SFT" and not args.debug_train_only:
        sentence = "supervised fine-tuning on conversations; engines only evaluate"
    rows = [("loop", sentence)]
    if kind == "serving":
        return LoopPlan(kind, tuple(rows))
    if kind == "fully asynchronous" or args.max_staleness is not None:
        limit = "tokens may be made by weights of any earlier step (--max-staleness)"
        if args.max_staleness is not None:
            limit = f"no token is trained on that lags more than {count(args.max_staleness, 'step')} (--max-staleness)"
        rows.append(("staleness", limit))
    if not args.debug_rollout_only:
        rows.append(("trains", _trains(args, kind)))
    if not args.debug_rollout_only and not args.debug_train_only:
        rows.append(("weight sync", _weight_sync(args, overlap)))
        if args.offload_train or args.offload_rollout or args.release_train:
            rows.append(("taking turns", _taking_turns(args)))
    if args.eval_interval is not None:
        rows.append(("evaluation", _evaluation(args, kind)))
    if not args.debug_rollout_only:
        rows.append(("first weights", first_weights(args)))
        rows.append(("checkpoints", _checkpoints(args)))
    return LoopPlan(kind, tuple(rows))


def _kind(args: Args, overlap: bool) -> Kind:
    if args.serve_only:
        return "serving"
    if args.debug_rollout_only:
        return "rollout only"
    if args.load_debug_rollout_data is not None:
        return "replay"
    if args.num_rollout == 0 and not args.debug_train_only:
        return "evaluation only"
    if args.rollout_function_path == SFT_ROLLOUT:
        return "SFT"
    if args.debug_train_only:
        return "train only"
    if overlap and generates_always(args):
        return "fully asynchronous"
    return "asynchronous" if overlap else "synchronous"


def _trains(args: Args, kind: Kind) -> str:
    if kind == "evaluation only":
        return "nothing; the trainer only loads the weights that are evaluated"
    if args.loss_type != "policy_loss":
        custom = f" {args.custom_loss_function_path}" if args.custom_loss_function_path else ""
        return f"--loss-type {args.loss_type}{custom}"
    parts = [f"the actor ({args.advantage_estimator})"]
    if args.use_critic:
        only = f", alone in the first {count(args.num_critic_only_steps, 'rollout')}"
        parts.append(f"a critic{only if args.num_critic_only_steps else ''}")
    text = " and ".join(parts)
    if needs_reference(args):
        text += f"; the reference model for the KL is {args.ref_load}"
    return text


def _weight_sync(args: Args, overlap: bool) -> str:
    what = "all weights" if args.update_weight_mode == "full" else "what changed of the weights"
    if args.update_weight_transport == "disk":
        way = f"through files in {args.update_weight_disk_dir}"
    elif args.update_weight_transport == "p2p":
        way = f"written into the engines' memory by every trainer rank ({args.update_weight_p2p_backend})"
    elif args.colocate:
        way = "through shared memory of the node"
    else:
        way = "through a process group of trainers and engines"
    interval = args.update_weights_interval
    when = "after every rollout" if interval == 1 else f"after every {interval} rollouts"
    if overlap:
        when += ", while requests are in flight" if generates_always(args) else ", between two generations"
    return f"{what} {way}, before the first and {when}"


def _taking_turns(args: Args) -> str:
    parts = []
    if args.release_train:
        parts.append("the trainers end while engines generate and start again from their checkpoint (--release-train)")
    if args.use_critic:
        parts.append("critic and actor take turns on the device memory of their slots")
    if args.offload_train and (args.colocate or not args.use_critic):
        parts.append("the trainer leaves the device memory while engines generate (--offload-train)")
    if args.offload_rollout:
        parts.append("engines leave it while the trainer trains (--offload-rollout)")
    return "; ".join(parts)


def _evaluation(args: Args, kind: Kind) -> str:
    if args.debug_train_only:
        return f"none without engines (--eval-interval {args.eval_interval})"
    sets = [
        f"{dataset.name} ({count(dataset.n_samples_per_eval_prompt or 1, 'sample')} per prompt)"
        for dataset in args.eval_datasets or []
    ]
    shown = ", ".join(sets[:6]) + (f" and {len(sets) - 6} more" if len(sets) > 6 else "")
    if kind == "evaluation only" or args.eval_interval is None:
        return f"once: {shown}"
    when = f"after {_every(args.eval_interval, args)}"
    if kind in ("synchronous", "rollout only") and not args.skip_eval_before_train:
        when = f"before rollout 0 and {when}"
    return f"{when}: {shown}"


def _every(interval: int, args: Args) -> str:
    rollouts = "every rollout" if interval == 1 else f"every {interval} rollouts"
    return rollouts if args.num_epoch is None else f"{rollouts}, every epoch"


def _checkpoints(args: Args) -> str:
    if args.save is None:
        return "none are written (--save)"
    if args.save_interval is None:
        return f"none are written to --save {args.save} without --save-interval"
    text = f"after {_every(args.save_interval, args)} and at the end, to {args.save}"
    kept = [f"the last {args.most_recent_k}"] if args.most_recent_k > 0 else []
    if args.save_retain_interval is not None:
        kept = [*(kept or ["the last"]), f"those after every {args.save_retain_interval} rollouts"]
    text += f", of which {' and '.join(kept)} are kept" if kept else ""
    return text + (f"; Hugging Face exports to {args.save_hf}" if args.save_hf else "")


# Batches: prompts x samples = one rollout = optimizer steps x global batch, and how a step is divided


@dataclass(frozen=True)
class BatchPlan:
    """The sizes of one rollout and of one optimizer step, counted in ``unit``.

    prompts x samples_per_prompt = samples of one rollout; global_batch_size: samples of one step, None where nothing is
    trained. micro_batch_size: samples per micro-batch, None where micro-batches are packed up to max_tokens_per_gpu x
    context_parallel_size tokens. num_rollout: end of the run, None where it depends on the data (num_epoch passes);
    start_rollout_id: None where it depends on the checkpoint. wave: prompts submitted together;
    filtered: groups may be dropped; fans_out: a trajectory may be several samples; own_function: a rollout function
    of the user's; from_dumps: rollouts are read, not generated.
    """

    prompts: int
    samples_per_prompt: int
    unit: str = "sample"
    global_batch_size: int | None = None
    data_parallel_size: int = 1
    micro_batch_size: int | None = None
    max_tokens_per_gpu: int | None = None
    context_parallel_size: int = 1
    num_rollout: int | None = None
    num_epoch: int | None = None
    start_rollout_id: int | None = 0
    wave: int | None = None
    filtered: bool = False
    fans_out: bool = False
    own_function: bool = False
    from_dumps: bool = False

    @property
    def samples(self) -> int:
        """Samples of one rollout."""
        return self.prompts * self.samples_per_prompt

    @property
    def steps(self) -> int:
        """Optimizer steps after the first rollout."""
        return self.samples // self.global_batch_size if self.global_batch_size else 0

    @property
    def left_over(self) -> int:
        """Samples of the first rollout that fill no step and wait for the next rollout."""
        return self.samples % self.global_batch_size if self.global_batch_size else 0

    @property
    def samples_per_rank(self) -> int | None:
        """Samples of one step on each data-parallel rank; None where these are not equal."""
        size = self.global_batch_size
        return size // self.data_parallel_size if size and size % self.data_parallel_size == 0 else None

    @property
    def micro_batches_per_rank(self) -> int | None:
        """Micro-batches of one step on each rank; None where they are packed by tokens."""
        size, per_rank = self.micro_batch_size, self.samples_per_rank
        return per_rank // size if size and per_rank and per_rank % size == 0 else None

    @property
    def rollouts(self) -> int | None:
        """Rollouts of this run; None where that is not known yet."""
        if self.num_rollout is None or self.start_rollout_id is None:
            return None
        return max(0, self.num_rollout - self.start_rollout_id)


def batch_of(args: Args) -> BatchPlan:
    """Return the batch identity of the flags."""
    sft = args.rollout_function_path == SFT_ROLLOUT
    trains = not args.debug_rollout_only
    fans_out = bool(args.custom_generate_function_path or args.custom_convert_samples_to_train_data_path)
    return BatchPlan(
        prompts=args.rollout_batch_size,
        samples_per_prompt=args.n_samples_per_prompt,
        unit="conversation" if sft else "sample",
        global_batch_size=args.global_batch_size if trains else None,
        data_parallel_size=args.data_parallel_size if trains else 1,
        micro_batch_size=None if args.use_dynamic_batch_size else args.micro_batch_size,
        max_tokens_per_gpu=args.max_tokens_per_gpu if args.use_dynamic_batch_size else None,
        context_parallel_size=args.context_parallel_size,
        num_rollout=args.num_rollout,
        num_epoch=args.num_epoch,
        start_rollout_id=args.start_rollout_id,
        wave=args.over_sampling_batch_size if args.rollout_function_path == DEFAULT_ROLLOUT else None,
        filtered=args.dynamic_sampling_filter_path is not None,
        fans_out=fans_out and not sft,
        own_function=args.rollout_function_path not in (DEFAULT_ROLLOUT, SFT_ROLLOUT, FULLY_ASYNC_ROLLOUT),
        from_dumps=args.load_debug_rollout_data is not None,
    )


def batch_rows(batch: BatchPlan) -> list[tuple[str, str]]:
    """Return the identity as (what, sentence)."""
    rows = [("one rollout", _rollout(batch))]
    if batch.global_batch_size is not None and batch.num_rollout != 0:
        rows.append(("one step", _step(batch)))
        if batch.left_over and not batch.from_dumps:
            left, one = count(batch.left_over, batch.unit), batch.left_over == 1
            wait = "fills no step; it waits and is" if one else "fill no step; they wait and are"
            rows.append(("left over", f"{left} of the first rollout {wait} trained on first after the next rollout"))
    if batch.global_batch_size is not None and not batch.from_dumps and (batch.fans_out or batch.own_function):
        rows.append(("counting", _counting(batch)))
    if batch.wave is not None and not batch.from_dumps:
        rows.append(("submission", _submission(batch)))
    rows.append(("the run", _run(batch)))
    return rows


def _rollout(batch: BatchPlan) -> str:
    if batch.from_dumps:
        return "what its dump holds (--load-debug-rollout-data); --rollout-batch-size is not looked at"
    if batch.unit == "conversation":
        made = count(batch.samples, batch.unit)
    else:
        made = (
            f"{count(batch.prompts, 'prompt')} x {count(batch.samples_per_prompt, 'sample')} "
            f"= {count(batch.samples, 'sample')}"
        )
    if not batch.global_batch_size or not batch.steps or batch.num_rollout == 0:
        return made
    made += f" = {count(batch.steps, 'optimizer step')} x {count(batch.global_batch_size, batch.unit)}"
    return f"{made} + {batch.left_over} left over" if batch.left_over else made


def _step(batch: BatchPlan) -> str:
    size = count(batch.global_batch_size or 0, batch.unit)
    ranks = count(batch.data_parallel_size, "data-parallel rank")
    if batch.max_tokens_per_gpu is not None:
        cap = f"{batch.max_tokens_per_gpu:,} tokens"
        if batch.context_parallel_size > 1:
            cap = (
                f"{batch.max_tokens_per_gpu * batch.context_parallel_size:,} tokens ({batch.max_tokens_per_gpu:,} on "
                f"each of its {batch.context_parallel_size} context-parallel slots)"
            )
        return f"{size} over {ranks}, packed into micro-batches of up to {cap}"
    text = f"{size} = {ranks}"
    if batch.micro_batches_per_rank is None:
        return f"{size} over {ranks}, in micro-batches of {count(batch.micro_batch_size or 1, batch.unit)}"
    return (
        f"{text} x {count(batch.micro_batches_per_rank, 'micro-batch')} x "
        f"{count(batch.micro_batch_size or 1, batch.unit)}"
    )


def _counting(batch: BatchPlan) -> str:
    if batch.own_function:
        return "your rollout function decides how many samples it returns; counted here is what the flags ask it for"
    return (
        "a sample here is one trajectory: if the generate function returns several samples of it, they count as one "
        "and stay in one step"
    )


def _submission(batch: BatchPlan) -> str:
    if batch.wave == batch.prompts and not batch.filtered:
        return "all prompts of a rollout at once"
    more = "whenever fewer than that are accepted or under way"
    kept = f"the first {count(batch.prompts, 'group')} accepted make the rollout"
    return f"{count(batch.wave or 0, 'prompt')} at a time, again {more.replace('that', str(batch.prompts))}; {kept}"


def _run(batch: BatchPlan) -> str:
    if batch.num_rollout == 0:
        return "no rollout (--num-rollout 0): evaluated once"
    if batch.num_rollout is None:
        return (
            f"{count(batch.num_epoch or 0, 'pass')} over the prompts (--num-epoch), each of as many rollouts as "
            f"{count(batch.prompts, 'prompt')} go into the data, which is counted when the run starts"
        )
    if batch.start_rollout_id is None:
        return f"rollouts up to number {batch.num_rollout - 1}, from the one after the checkpoint's on"
    rollouts = batch.rollouts or 0
    if rollouts == 0:
        return f"nothing to do: it starts at rollout {batch.start_rollout_id} and --num-rollout is {batch.num_rollout}"
    text = f"{count(rollouts, 'rollout')} ({span(range(batch.start_rollout_id, batch.num_rollout))})"
    if batch.from_dumps:
        return text
    samples = rollouts * batch.samples
    text += f" = {count(samples, batch.unit)}"
    if not batch.global_batch_size:
        return text
    steps, rest = divmod(samples, batch.global_batch_size)
    text += f" = {count(steps, 'optimizer step')} x {count(batch.global_batch_size, batch.unit)}"
    return f"{text} + {rest} at the end that no step trains" if rest else text

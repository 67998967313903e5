"""Batch identity: prompts x samples = one rollout = optimizer steps x global batch, and how a step is divided."""

from __future__ import annotations

from dataclasses import dataclass

from slime.arguments.args import Args
from slime.arguments.groups.rollout import DEFAULT_ROLLOUT, FULLY_ASYNC_ROLLOUT
from slime.arguments.rules.loop import SFT_ROLLOUT
from slime.preflight.plan.format import count, span


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

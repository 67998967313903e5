"""The loop that a command line runs, in sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime.arguments.args import Args
from slime.arguments.rules.checkpoints import first_weights, needs_reference
from slime.arguments.rules.loop import SFT_ROLLOUT, generates_always
from slime.preflight.plan.format import count

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
    return text + (f"; Hugging Face exports to {args.save_hf}" if args.save_hf else "")

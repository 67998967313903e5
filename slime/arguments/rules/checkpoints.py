"""Rules for the checkpoint that is read and the directory that checkpoints are written to."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from slime.algorithms.estimators import estimator_of
from slime.arguments import diagnostics
from slime.arguments.args import Args
from slime.arguments.command_line import flags_where
from slime.arguments.errors import ArgumentError
from slime.utils import checkpoint_tracker
from slime.utils.checkpoint_tracker import TRACKER
from slime.utils.digests import DamagedFile


def is_megatron_checkpoint(path: str | None) -> bool:
    """Return True if ``path`` is a directory with Megatron's tracker file."""
    return path is not None and (Path(path) / TRACKER).is_file()


def is_hf_checkpoint(path: str | None) -> bool:
    """Return True if ``path`` is a directory with a Hugging Face ``config.json``."""
    return path is not None and (Path(path) / "config.json").is_file()


def fall_back_to_hf_checkpoint(args: Args) -> None:
    """``--ref-load`` is ``--hf-checkpoint`` unless given; a reference that is needed must exist."""
    if args.ref_load is None:
        args.ref_load = args.hf_checkpoint
    if not needs_reference(args):
        return
    if not Path(args.ref_load).is_dir():
        why = "--kl-coef" if args.kl_coef != 0 else "--use-kl-loss"
        diagnostics.unavailable(
            args,
            f"{why} needs a reference model, but --ref-load {args.ref_load} is no directory; "
            "give a Megatron or a Hugging Face checkpoint",
        )
    elif not is_megatron_checkpoint(args.ref_load) and not is_hf_checkpoint(args.ref_load):
        diagnostics.warn(args, f"--ref-load {args.ref_load} has neither {TRACKER} nor config.json")


def trains_policy(args: Args) -> bool:
    """Return True if the policy is trained: not in a run that only generates or evaluates, or only trains a critic."""
    if args.debug_rollout_only or args.num_rollout == 0:
        return False
    critic_alone = args.num_rollout is not None and args.num_critic_only_steps >= args.num_rollout
    return not (estimator_of(args).needs_critic and critic_alone)


def needs_reference(args: Args) -> bool:
    """Return True if trainers load a reference model."""
    return bool(args.kl_coef != 0 or args.use_kl_loss) and trains_policy(args)


def needs_teacher(args: Args) -> bool:
    """Return True if trainers load the weights of a teacher; one behind a server is not loaded by them."""
    return bool(args.use_opd) and args.opd_type == "megatron" and trains_policy(args)


def resolve_load(args: Args) -> None:
    """Continue a Megatron checkpoint when ``--load`` is one; otherwise start from weights alone, at rollout 0.

    ``args.continues_own_checkpoints`` says whether the run, when restarted, resumes from its own ``--save``.
    """
    if not hasattr(args, "continues_own_checkpoints"):  # afterwards --load may be where the first weights come from
        args.continues_own_checkpoints = _same_directory(args.load, args.save) and not args.finetune
    if args.ref_ckpt_step is not None and not is_megatron_checkpoint(args.ref_load):
        _no_steps(args, f"--ref-ckpt-step {args.ref_ckpt_step}: --ref-load {args.ref_load}", args.ref_load)
    if is_megatron_checkpoint(args.load):
        _check_resume(args)
        return
    if args.load is not None:
        _check_tracker(args, checkpoint_tracker.check_absence)
    args.no_load_optim = args.no_load_rng = args.finetune = True
    if not is_hf_checkpoint(args.load):
        _start_from_reference(args)
    if args.ckpt_step is not None and not is_megatron_checkpoint(args.load):
        _no_steps(args, f"--ckpt-step {args.ckpt_step}: --load {args.load}", args.load)
    if args.start_rollout_id is None:
        args.start_rollout_id = 0


def _same_directory(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and Path(one).absolute() == Path(other).absolute()


def _start_from_reference(args: Args) -> None:
    if args.load not in (None, args.ref_load) and not args.debug_rollout_only:
        _refuse_nothing_to_load(args)
    if not Path(args.ref_load).is_dir() and not args.debug_rollout_only and not needs_reference(args):
        diagnostics.unavailable(
            args, f"--ref-load {args.ref_load} is no directory, and the first weights are read from it"
        )
    args.load = args.ref_load
    if args.ref_ckpt_step is not None:
        args.ckpt_step = args.ref_ckpt_step


def _refuse_nothing_to_load(args: Args) -> None:
    """Only the directory of ``--save`` may be empty: the first start of a run that is to be resumed finds it so."""
    if _same_directory(args.load, args.save):
        return
    found = f"has neither {TRACKER} nor config.json" if Path(args.load).is_dir() else "is no directory"
    diagnostics.unavailable(
        args,
        f"--load {args.load} {found}, so there is nothing to load; correct the path, leave it out to start from "
        f"--ref-load {args.ref_load}, or let --load be --save for a run that continues whenever it is started again",
    )


def first_weights(args: Args) -> str:
    """Return where the first weights of a run come from, and whether it resumes or starts fresh."""
    if is_megatron_checkpoint(args.load) and not args.finetune:
        step = args.ckpt_step if args.ckpt_step is not None else _last_step(args.load)
        return f"{args.load}, after rollout {step}" if isinstance(step, int) else str(args.load)
    if args.continues_own_checkpoints:
        return f"{args.load}, from rollout {args.start_rollout_id}: --save {args.save} holds no checkpoint yet"
    return str(args.load)


def _last_step(directory: str) -> int | None:
    """The last complete checkpoint; None for ``release``, and for a tracker file that cannot be read."""
    try:
        return int((Path(directory) / TRACKER).read_text())
    except (OSError, ValueError):
        return None


def _check_resume(args: Args) -> None:
    if args.ckpt_step is not None and not (Path(args.load) / f"iter_{args.ckpt_step:07d}").is_dir():
        raise ArgumentError(f"--ckpt-step {args.ckpt_step}: --load {args.load} has no iter_{args.ckpt_step:07d}")
    if args.ckpt_step is None:
        _check_tracker(args, checkpoint_tracker.read)
    if args.no_load_optim and not args.finetune and not args.debug_rollout_only:
        diagnostics.warn(
            args,
            f"--no-load-optim: the run continues {args.load} with a fresh optimizer, and the learning rate starts its "
            "schedule (warm-up, decay) again",
        )


def _check_tracker(args: Args, check: Callable[[str], object]) -> None:
    try:
        check(args.load)
    except DamagedFile as e:
        raise ArgumentError(f"--load {args.load}: {e}") from None


def _no_steps(args: Args, what: str, path: str) -> None:
    message = f"{what} has no {TRACKER} and so no steps; leave it out"
    if Path(path).is_dir():
        raise ArgumentError(message)
    diagnostics.unavailable(args, message)


def check_save(args: Args) -> None:
    """Intervals and exports need a directory to save to, and one that can be written."""
    if args.save_interval is not None and args.save is None:
        raise ArgumentError(f"--save-interval {args.save_interval} needs --save DIRECTORY")
    if args.most_recent_k == 0:
        raise ArgumentError("--most-recent-k 0 would keep no checkpoint; give at least 1, or leave it out to keep all")
    if args.save_retain_interval is not None and args.save_retain_interval % (args.save_interval or 1):
        raise ArgumentError(
            f"--save-retain-interval {args.save_retain_interval} is no multiple of --save-interval "
            f"{args.save_interval}: few of the checkpoints that it keeps would be saved; use a multiple"
        )
    if args.save_hf is not None and args.save is None:
        raise ArgumentError(f"--save-hf {args.save_hf} is written with every checkpoint and needs --save DIRECTORY")
    if args.save is None:
        return
    if args.debug_rollout_only:
        diagnostics.warn(args, f"--save {args.save} has no effect with --debug-rollout-only, which trains nothing")
        return
    if args.save_interval is None:
        diagnostics.warn(args, f"--save {args.save}: nothing is saved without --save-interval N")
    else:
        _refuse_to_overwrite(args)
    if not args.dry_run:
        _check_writable(args, args.save)


def check_format(args: Args) -> None:
    """Refuse what only ``torch_dist`` stores: it alone knows which part of a tensor a rank has."""
    form = args.ckpt_format
    if args.save is None or form == "torch_dist":
        return
    divided = {flag.option: getattr(args, flag.dest) for flag in flags_where(lambda traits: traits.divides_model)}
    expert_tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    conflicts = [
        ("--async-save", args.async_save, "is written while training waits"),
        ("--lora-rank", args.lora_rank, "holds whole models, and no adapters"),
        ("--optimizer sgd", form == "torch_dcp" and args.optimizer == "sgd", "holds the state of Adam"),
        *((option, form == "torch_dcp" and size > 1, "holds an undivided model") for option, size in divided.items()),
        (
            f"--expert-tensor-parallel-size {expert_tensor}",
            expert_tensor > args.tensor_model_parallel_size,
            "names files by --tensor-model-parallel-size, of which there are fewer",
        ),
    ]
    for option, given, why in conflicts:
        if given:
            raise ArgumentError(f"--ckpt-format {form} {why}: leave out {option}, or --ckpt-format (torch_dist)")


def _refuse_to_overwrite(args: Args) -> None:
    """Never overwrite checkpoints of another run: only the run that resumes them writes beside them."""
    last = None if args.save is None else _last_step(args.save)
    if last is None or args.num_rollout == 0:
        return
    if not args.continues_own_checkpoints:
        why = ", and --finetune starts at rollout 0" if _same_directory(args.load, args.save) else ""
        raise ArgumentError(
            f"--save {args.save} holds the checkpoints of another run, the last of rollout {last}{why}: this run would "
            f"overwrite them; choose another directory, or continue them: --load {args.save}"
            + (" without --finetune" if why else "")
        )
    if args.ckpt_step is not None and args.ckpt_step < last:
        diagnostics.warn(
            args,
            f"--ckpt-step {args.ckpt_step}: the checkpoints of --save {args.save} after rollout {args.ckpt_step}, up "
            f"to rollout {last}, will be replaced by those of this run",
        )


def refuse_checkpoints_since(args: Args) -> None:
    """Refuse to start over checkpoints that another run has saved while this one started.

    ``--load`` was resolved when they were not there. Called when no other run can write any more.
    """
    if args.save is None or args.debug_rollout_only or args.serve_only or args.save_interval is None:
        return
    _refuse_to_overwrite(args)
    if args.continues_own_checkpoints and is_megatron_checkpoint(args.save) and not is_megatron_checkpoint(args.load):
        raise ArgumentError(
            f"--save {args.save}: another run has saved checkpoints there while this one started, from the first "
            "weights; start it again, and it continues with them"
        )


def _check_writable(args: Args, save: str) -> None:
    """Look at the nearest directory that is there. Other nodes may see it differently, so that several only warn."""
    directory = Path(save)
    existing = next((path for path in (directory, *directory.absolute().parents) if path.exists()), None)
    if existing is not None and not existing.is_dir():
        raise ArgumentError(f"--save {save}: {existing} is a file, a directory is expected")
    if existing is None or os.access(existing, os.W_OK | os.X_OK):
        return
    message = f"--save {save}: {existing} cannot be written by this user; choose another directory"
    if args.actor_num_nodes == 1:
        raise ArgumentError(message)
    diagnostics.warn(args, message)

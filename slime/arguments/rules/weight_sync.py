"""Weight synchronization through files, changed bytes only, and trainers that end in between."""

from __future__ import annotations

import os
from importlib.util import find_spec

from slime.arguments import diagnostics
from slime.arguments.args import Args
from slime.arguments.errors import ArgumentError
from slime.arguments.placement import engine_sizes, engines_of, models_of
from slime.arguments.rules.checkpoints import is_megatron_checkpoint, needs_reference
from slime.weights.p2p.agents import PACKAGES


def check(args: Args) -> None:
    """Refuse transports and modes that lack a directory or contradict the placement."""
    if args.update_weight_transport == "disk" and args.update_weight_disk_dir is None:
        raise ArgumentError(
            "--update-weight-transport disk needs --update-weight-disk-dir, a directory that trainers and engines share"
        )
    if args.rollout_data_transport == "nixl" and not args.debug_rollout_only and find_spec("nixl") is None:
        raise ArgumentError(
            f"--rollout-data-transport nixl needs the package nixl, which is not installed: pip install "
            f"{PACKAGES['nixl']}, or leave it out"
        )
    if args.update_weight_transport == "p2p":
        _check_p2p(args)
    if args.update_weight_mode == "delta":
        _check_delta(args)
    _check_directories(args)
    if args.release_train:
        _check_release(args)
    if args.keep_old_actor and args.use_rollout_logprobs:
        diagnostics.warn(
            args,
            "--keep-old-actor has no effect with --use-rollout-logprobs, which takes the old log-probs from the "
            "engines",
        )
    syncs = not args.debug_train_only and not args.debug_rollout_only
    if syncs and any(model.update_weights and model.has_pd_disaggregation for model in models_of(args) or ()):
        _pause_disaggregated(args)
    in_place = args.weight_sync_pause_mode == "in_place"
    if syncs and in_place and not args.sglang_disable_radix_cache:
        raise ArgumentError(
            "--weight-sync-pause-mode in_place leaves the engines' prefix cache with values of the old weights; add "
            "--sglang-disable-radix-cache, or use retract"
        )


def check_engine_stages(args: Args) -> None:
    """Raise ArgumentError for pipeline stages in engines that a trainer sends weights to: it cannot address a stage."""
    if args.debug_train_only or args.debug_rollout_only or args.update_weight_transport == "disk":
        return
    for plan in engines_of(args):
        stages = engine_sizes(args, plan).pp
        if plan.update_weights and stages > 1:
            raise ArgumentError(
                f"--sglang-pp-size {stages}: SGLang counts the ranks that take weights from a trainer within a stage, "
                "and cannot tell stages apart; add --update-weight-transport disk and --update-weight-disk-dir, or "
                "leave --sglang-pp-size out"
            )


def _pause_disaggregated(args: Args) -> None:
    """Prompts on their way from one engine to another belong to neither: a paused pair could not empty its caches."""
    mode = args.weight_sync_pause_mode
    if mode not in ("auto", "abort"):
        raise ArgumentError(
            f"--weight-sync-pause-mode {mode}: prefill and decode engines cannot keep requests that are on their way "
            "from one to the other while their caches are flushed; use abort: requests are continued from the tokens "
            "that they have"
        )
    args.weight_sync_pause_mode = "abort"


def _check_directories(args: Args) -> None:
    """Versions of weights are removed again: nothing else may live among them."""
    shared, local = args.update_weight_disk_dir, args.update_weight_local_checkpoint_dir
    if args.update_weight_transport != "disk":
        return
    if local is not None and os.path.abspath(local) == os.path.abspath(shared):
        raise ArgumentError(
            f"--update-weight-local-checkpoint-dir and --update-weight-disk-dir are both {shared}; the local one is a "
            "directory of each engine host itself, give it another name"
        )
    if local is not None and args.rollout_external:
        raise ArgumentError(
            "--update-weight-local-checkpoint-dir is filled by processes of the run on the engines' hosts, and the run "
            "has none beside the engines of --rollout-external-engine-addrs; leave it out, and they read "
            "--update-weight-disk-dir"
        )


def _check_release(args: Args) -> None:
    """The trainers end after every step and restart from their checkpoint."""
    if args.use_critic:
        raise ArgumentError(
            "--release-train ends the trainers between rollouts, which a critic (--advantage-estimator ppo) does not "
            "survive; leave one of them out"
        )
    if args.keep_old_actor:
        raise ArgumentError(
            "--release-train ends the trainers, and with them the weights of --keep-old-actor; leave one of them out"
        )
    if args.save is None:
        raise ArgumentError("--release-train restarts the trainers from their checkpoint and needs --save DIRECTORY")
    if args.update_weight_mode != "full" or args.update_weight_transport != "disk":
        raise ArgumentError(
            f"--release-train needs --update-weight-mode full and --update-weight-transport disk, not "
            f"{args.update_weight_mode} and {args.update_weight_transport}: weights must outlive the trainers"
        )
    if args.offload_train:
        raise ArgumentError(
            "--release-train ends the trainers while engines generate, so that --offload-train has nothing to offload; "
            "leave one of them out"
        )
    if args.no_save_optim and not (args.use_stateless_adam and args.fp32):
        raise ArgumentError(
            "--release-train restarts the trainers from their checkpoint after every step, and --no-save-optim leaves "
            "Adam's state and the fp32 weights out of it; leave one of them out"
            + (" (--use-stateless-adam goes with --fp32)" if args.use_stateless_adam else "")
        )
    elsewhere = is_megatron_checkpoint(args.load) and not args.finetune and not args.continues_own_checkpoints
    if args.ref_update_interval is not None and needs_reference(args) and elsewhere:
        raise ArgumentError(
            f"--release-train looks below --save {args.save} for the reference of --ref-update-interval "
            f"{args.ref_update_interval}, and the one that --load {args.load} continues with is not there; let --save "
            "be --load, or take its weights as a fresh start with --finetune"
        )
    if args.save_interval is None:
        args.save_interval = 1


def _check_p2p(args: Args) -> None:
    """Trainers write into the engines' memory where that has been tested, and where it stays what it is."""
    p2p = "--update-weight-transport p2p"
    disaggregated = any(model.update_weights and model.has_pd_disaggregation for model in models_of(args) or ())
    for option, given, why in (
        ("--colocate", args.colocate, "shared slots hand weights over in memory"),
        ("--update-weight-mode delta", args.update_weight_mode == "delta", "all weights are written"),
        ("--offload-rollout", args.offload_rollout, "engines would release the memory that is written to"),
        ("--rollout-external-engine-addrs", args.rollout_external, "it needs slime's plug-in in the engines"),
        ("--actor-num-nodes", args.actor_num_nodes > 1, "it is tested on one host only"),
        ("--sglang-speculative-algorithm", args.sglang_speculative_algorithm, "it does not reach draft layers"),
    ):
        if given:
            raise ArgumentError(f"{option}: not together with {p2p}, {why}; leave one of them out")
    if disaggregated:
        raise ArgumentError(f"{p2p}: it is not tested with prefill and decode engines; leave it out")
    backend = args.update_weight_p2p_backend
    if find_spec(backend) is None:
        raise ArgumentError(
            f"{p2p} needs the package {backend}, which is not installed: pip install {PACKAGES[backend]}, or choose "
            "another --update-weight-p2p-backend"
        )


def _check_delta(args: Args) -> None:
    if args.colocate:
        raise ArgumentError(
            "--update-weight-mode delta and --colocate exclude each other: shared slots hand weights over in memory; "
            "use --update-weight-mode full"
        )
    if args.update_weight_transport == "disk":
        _check_delta_files(args)
    else:
        _check_delta_in_place(args)
    checks = args.update_weight_mode == "delta" and args.update_weight_delta_checksum == "blake3"
    if checks and find_spec("blake3") is None:
        raise ArgumentError(
            "--update-weight-delta-checksum blake3 needs the package blake3, which is not installed: pip install "
            "blake3, or use xxh3-128"
        )


def _check_delta_files(args: Args) -> None:
    if args.update_weight_local_checkpoint_dir is None:
        raise ArgumentError(
            "--update-weight-mode delta needs --update-weight-local-checkpoint-dir, where each engine host keeps the "
            "checkpoint that changes are applied to"
        )
    if args.rollout_external:
        diagnostics.warn(
            args,
            "--update-weight-mode delta: changes are applied by processes of the run on the engines' hosts, and it has "
            "none beside the engines of --rollout-external-engine-addrs; they read all weights from "
            "--update-weight-disk-dir",
        )
        args.update_weight_mode, args.update_weight_local_checkpoint_dir = "full", None


def _check_delta_in_place(args: Args) -> None:
    """New values alone are written into an engine's weights: writing them twice does no harm."""
    if args.update_weight_delta_encoding == "xor" and "update_weight_delta_encoding" in args.explicit_flags:
        raise ArgumentError(
            "--update-weight-delta-encoding xor: differences are applied to files, and changes go into the engines' "
            "memory without --update-weight-transport disk; leave it out"
        )
    if args.offload_rollout:
        raise ArgumentError(
            "--update-weight-mode delta: engines that release their weights for --offload-rollout need all of them "
            "again; leave one of them out, or add --update-weight-transport disk"
        )
    args.update_weight_delta_encoding = "overwrite"
    if args.rollout_external:
        diagnostics.warn(
            args,
            "--update-weight-mode delta: changes are taken by slime's plug-in for SGLang, which the engines of "
            "--rollout-external-engine-addrs may lack; they are sent all weights",
        )
        args.update_weight_mode = "full"

"""Mixture of experts: parallel sizes, router, routing replay, and flags that need experts."""

from __future__ import annotations

import importlib.util

from slime.arguments import diagnostics
from slime.arguments.args import Args
from slime.arguments.command_line import flags_where
from slime.arguments.errors import ArgumentError


def check(args: Args) -> None:
    """Refuse sizes that do not fit; routing replay of the engines implies that of the trainer."""
    if args.use_rollout_routing_replay:
        args.use_routing_replay = True
    _derive_expert_slots(args)
    if args.num_experts is None:
        _check_dense(args)
    else:
        if args.num_experts < 1:
            raise ArgumentError(f"--num-experts {args.num_experts}: give at least 1, or leave it out for a dense model")
        _check_parallel_sizes(args, args.num_experts)
        _choose_dispatcher(args)
        _check_router(args, args.num_experts)
        _check_balancing(args)
        _check_layers(args)
    _check_groups(args)


def _derive_expert_slots(args: Args) -> None:
    ep, etp, pp = args.expert_model_parallel_size, _tensor_size(args), args.pipeline_model_parallel_size
    if min(ep, etp) < 1:
        raise ArgumentError(f"--expert-model-parallel-size {ep}, --expert-tensor-parallel-size {etp}: at least 1 each")
    if args.num_experts is None and (ep > 1 or args.expert_tensor_parallel_size is None):
        return
    if args.world_size % (etp * ep * pp) != 0:
        raise ArgumentError(
            f"{args.world_size} training slots (--actor-num-nodes {args.actor_num_nodes} x --actor-num-gpus-per-node "
            f"{args.actor_num_gpus_per_node}) cannot be divided by --expert-tensor-parallel-size {etp} x "
            f"--expert-model-parallel-size {ep} x --pipeline-model-parallel-size {pp} = {etp * ep * pp}; change the "
            "slots or the parallel sizes"
        )


def _tensor_size(args: Args) -> int:
    """Tensor-parallel size of experts: that of the rest of the model unless given."""
    given = args.expert_tensor_parallel_size
    return int(args.tensor_model_parallel_size if given is None else given)


def _check_groups(args: Args) -> None:
    """Megatron makes groups for experts in every model, and two flags ask more of them than that the slots divide."""
    ep, etp, pp = args.expert_model_parallel_size, _tensor_size(args), args.pipeline_model_parallel_size
    tp, cp, instances = (
        args.tensor_model_parallel_size,
        args.context_parallel_size,
        args.num_distributed_optimizer_instances,
    )
    if args.use_tp_pp_dp_mapping and pp > 1 and tp * cp != etp * ep:
        raise ArgumentError(
            f"--use-tp-pp-dp-mapping with --pipeline-model-parallel-size {pp} needs --tensor-model-parallel-size {tp} "
            f"x --context-parallel-size {cp} = {tp * cp} to equal --expert-tensor-parallel-size {etp} x "
            f"--expert-model-parallel-size {ep} = {etp * ep}; leave it out or change these sizes"
        )
    for what, ranks in (
        ("data x context parallel", args.data_parallel_size * cp),
        ("expert data parallel", args.world_size // (etp * ep * pp)),
    ):
        if instances < 1 or ranks % instances != 0:
            raise ArgumentError(
                f"--num-distributed-optimizer-instances {instances} must divide the {ranks} {what} ranks"
            )


def _check_dense(args: Args) -> None:
    if args.expert_model_parallel_size > 1:
        raise ArgumentError(
            f"--expert-model-parallel-size {args.expert_model_parallel_size} divides experts, of which the model has "
            "none; give --num-experts, or leave it out"
        )
    if args.use_rollout_routing_replay:
        raise ArgumentError(
            "--use-rollout-routing-replay replays the choice of experts, of which the model has none; give "
            "--num-experts, or leave it out"
        )
    given: frozenset[str] = args.explicit_flags
    describing = [flag.dest for flag in flags_where(lambda traits: traits.needs_experts)]
    for name in describing:
        if name in given and getattr(args, name):
            raise ArgumentError(
                f"--{name.replace('_', '-')} {getattr(args, name)} describes experts, of which the model has none; "
                "give --num-experts, or leave it out"
            )
    for name in sorted(given):
        if name.startswith("moe_") and name not in describing and getattr(args, name):
            diagnostics.warn(args, f"--{name.replace('_', '-')} has no effect without --num-experts")
    if isinstance(args.moe_router_load_balancing_type, list) or isinstance(args.moe_aux_loss_coeff, list):
        # Megatron compares their lengths in every model.
        args.moe_router_load_balancing_type, args.moe_aux_loss_coeff = "none", 0.0


def _check_parallel_sizes(args: Args, experts: int) -> None:
    ep, tp = args.expert_model_parallel_size, args.tensor_model_parallel_size
    if experts % ep != 0:
        raise ArgumentError(
            f"--num-experts {experts} cannot be divided among --expert-model-parallel-size {ep} ranks; use a "
            "size that divides them"
        )
    if tp > 1 and not args.sequence_parallel and not args.debug_rollout_only:
        raise ArgumentError(
            f"--num-experts {args.num_experts} with --tensor-model-parallel-size {tp} needs --sequence-parallel; add it"
        )


def _choose_dispatcher(args: Args) -> None:
    """DeepEP carries tokens where it can; elsewhere alltoall does, which computes the same.

    A dry run keeps it: the trainers may have what this machine has not.
    """
    if args.moe_token_dispatcher_type != "flex":
        return
    if args.moe_enable_deepep and args.moe_flex_dispatcher_backend == "hybridep":
        raise ArgumentError(
            "--moe-enable-deepep and --moe-flex-dispatcher-backend hybridep name two backends; leave one of them out"
        )
    if args.expert_model_parallel_size * _tensor_size(args) == 1:
        why = "all experts are on every rank, so that there is nothing to send"
    elif importlib.util.find_spec("deep_ep") is None:
        why = "the package deep_ep, which it needs, is not installed"
    else:
        return
    message = f"--moe-token-dispatcher-type flex: {why}; alltoall is used"
    if args.dry_run and "deep_ep" in why:
        diagnostics.unavailable(args, f"{message} where that holds for the trainers")
        return
    diagnostics.warn(args, message)
    args.moe_token_dispatcher_type, args.moe_enable_deepep = "alltoall", False


def _check_router(args: Args, experts: int) -> None:
    topk = args.moe_router_topk
    if not 1 <= topk <= experts:
        raise ArgumentError(f"--moe-router-topk {topk} must lie between 1 and --num-experts {experts}")
    if (
        topk == 1
        and args.moe_router_score_function == "softmax"
        and args.moe_router_load_balancing_type != "sinkhorn"
        and not args.moe_router_pre_softmax
    ):
        raise ArgumentError(
            "--moe-router-topk 1 needs --moe-router-pre-softmax: the softmax over a single expert has no gradient; "
            "add it"
        )
    groups, group_topk = args.moe_router_num_groups, args.moe_router_group_topk
    if group_topk is not None and groups is None:
        raise ArgumentError(f"--moe-router-group-topk {group_topk} needs --moe-router-num-groups, of how many groups?")
    if groups is None:
        return
    if groups < 1 or experts % groups != 0:
        raise ArgumentError(
            f"--num-experts {experts} cannot be divided into --moe-router-num-groups {groups}; correct one of them"
        )
    if group_topk is not None and not 1 <= group_topk <= groups:
        raise ArgumentError(
            f"--moe-router-group-topk {group_topk} must lie between 1 and --moe-router-num-groups {groups}"
        )
    if group_topk is not None and topk > experts // groups * group_topk:
        raise ArgumentError(
            f"--moe-router-topk {topk} is more than the {experts // groups * group_topk} experts in "
            f"--moe-router-group-topk {group_topk} groups of {experts // groups} each; lower it or raise that"
        )


def _check_balancing(args: Args) -> None:
    if args.moe_router_enable_expert_bias and args.moe_router_score_function != "sigmoid":
        raise ArgumentError(
            "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid, not "
            f"{args.moe_router_score_function}"
        )
    kinds, coefficients = _pairs(args)
    if "sinkhorn" in kinds:
        raise ArgumentError(
            "--moe-router-load-balancing-type sinkhorn sends tokens to other experts in training steps than in the "
            "pass that computes their log-probs; use aux_loss or none"
        )
    if unknown := [kind for kind in kinds if kind not in _BALANCING]:
        raise ArgumentError(f"--moe-router-load-balancing-type {unknown[0]}: choose among {', '.join(_BALANCING)}")
    if len(kinds) != len(set(kinds)) or len(kinds) != len(coefficients):
        raise ArgumentError(
            f"--moe-router-load-balancing-type {' '.join(kinds)} needs one --moe-aux-loss-coeff for each, and each "
            f"once; got {' '.join(map(str, coefficients))}"
        )
    for kind, coefficient in zip(kinds, coefficients, strict=True):
        _check_coefficient(kind, coefficient)
    if args.moe_z_loss_coeff is not None and args.moe_z_loss_coeff < 0:
        raise ArgumentError(f"--moe-z-loss-coeff {args.moe_z_loss_coeff} must not be negative")
    if args.moe_per_layer_logging and not any(coefficients) and not args.moe_z_loss_coeff:
        raise ArgumentError(
            "--moe-per-layer-logging logs the losses of routers, of which none is on; give --moe-aux-loss-coeff or "
            "--moe-z-loss-coeff, or leave it out"
        )


_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")


def _pairs(args: Args) -> tuple[list[str], list[float]]:
    """Return the kinds of load balancing and their coefficients; 0 means 0 of every kind."""
    kinds, coefficients = args.moe_router_load_balancing_type, args.moe_aux_loss_coeff
    kinds = list(kinds) if isinstance(kinds, list | tuple) else [kinds]
    if isinstance(coefficients, list | tuple):
        return kinds, list(coefficients)
    if not coefficients and len(kinds) > 1:
        args.moe_aux_loss_coeff = coefficients = [0.0] * len(kinds)  # Megatron wants one for each
        return kinds, coefficients
    return kinds, [coefficients or 0.0]


def _check_coefficient(kind: str, coefficient: float) -> None:
    if coefficient < 0:
        raise ArgumentError(f"--moe-aux-loss-coeff {coefficient} must not be negative")
    if coefficient and kind == "none":
        raise ArgumentError(
            f"--moe-aux-loss-coeff {coefficient} has no loss to weigh with --moe-router-load-balancing-type none; use "
            "aux_loss or seq_aux_loss, or leave the coefficient out"
        )
    if coefficient and kind == "global_aux_loss":
        raise ArgumentError(
            f"--moe-aux-loss-coeff {coefficient} with --moe-router-load-balancing-type global_aux_loss: the load of "
            "the whole batch is known after its last forward alone, and Megatron's running mean makes gradients depend "
            "on the order of micro-batches and on the number of ranks; use seq_aux_loss or aux_loss"
        )


def _check_layers(args: Args) -> None:
    frequency = args.moe_layer_freq
    if isinstance(frequency, list) and args.num_layers is not None and len(frequency) != args.num_layers:
        raise ArgumentError(
            f"--moe-layer-freq has {len(frequency)} entries, one per layer, but --num-layers is {args.num_layers}; "
            "correct one of them"
        )
    if isinstance(frequency, int) and frequency < 1:
        raise ArgumentError(f"--moe-layer-freq {frequency}: every how many layers are experts? Give at least 1")
    if args.moe_shared_expert_overlap and args.moe_token_dispatcher_type == "flex":
        raise ArgumentError("--moe-shared-expert-overlap needs --moe-token-dispatcher-type alltoall, not flex")
    if args.moe_enable_deepep and args.moe_token_dispatcher_type != "flex":
        raise ArgumentError(
            f"--moe-enable-deepep needs --moe-token-dispatcher-type flex, not {args.moe_token_dispatcher_type}"
        )
    if args.moe_pad_expert_input_to_capacity and args.moe_expert_capacity_factor is None:
        raise ArgumentError("--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor; add it")


def check_routing_replay(args: Args) -> None:
    """Refuse models and routers without a choice to repeat, and runs without the pass that records it."""
    if not args.use_routing_replay:
        return
    flag = "--use-rollout-routing-replay" if args.use_rollout_routing_replay else "--use-routing-replay"
    if args.num_experts is None:
        raise ArgumentError(
            f"{flag} replays the choice of experts, of which the model has none; give --num-experts, or leave it out"
        )
    if args.moe_router_fusion:
        raise ArgumentError(
            f"{flag} cannot tell the kernel of --moe-router-fusion which experts to take; leave one of them out"
        )
    if not args.use_rollout_routing_replay and not args.compute_advantages_and_returns:
        raise ArgumentError(
            "--use-routing-replay records in the log-prob pass, which --disable-compute-advantages-and-returns leaves "
            "out; leave one of them out"
        )

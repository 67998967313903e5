"""Slots of training and inference, and the engines on them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from slime.arguments import diagnostics
from slime.arguments.args import Args
from slime.arguments.command_line import flags_where
from slime.arguments.errors import ArgumentError
from slime.arguments.placement import Model, ServerGroup, engines_of, layout_of, models_of

LANGUAGE_ONLY = frozenset({"language_only", "encoder_urls"})
OF_ENCODERS = LANGUAGE_ONLY | {"encoder_only", "encoder_register_urls"}
"""Fields of SGLang with which one engine encodes images and another one generates."""


def apply_offload_shorthand(args: Args) -> None:
    """``--offload`` is both offloads; the attribute goes away."""
    if not hasattr(args, "offload"):
        return
    if args.offload:
        for name in ("offload_train", "offload_rollout"):
            if getattr(args, name) is False:
                raise ArgumentError(f"--offload and --no-{name.replace('_', '-')} contradict each other; leave one out")
            setattr(args, name, True)
    del args.offload


def fit_rollout_only(args: Args) -> None:
    """Without a trainer all slots generate."""
    if not args.debug_rollout_only:
        return
    if not args.rollout_external:
        _give_all_slots_to_engines(args)
    args.colocate = args.offload_train = args.offload_rollout = False


def _give_all_slots_to_engines(args: Args) -> None:
    if args.rollout_num_gpus is None:
        if not args.colocate:
            message = "--debug-rollout-only needs --rollout-num-gpus: how many slots generate?"
            diagnostics.missing_flag(args, "rollout_num_gpus", message)
        args.rollout_num_gpus = args.actor_num_nodes * args.actor_num_gpus_per_node
    elif args.rollout_num_gpus == 0:
        args.actor_num_gpus_per_node = args.actor_num_nodes = 0
    else:
        args.actor_num_gpus_per_node = min(8, args.rollout_num_gpus)
        args.actor_num_nodes = args.rollout_num_gpus // args.actor_num_gpus_per_node


def resolve_colocation(args: Args) -> None:
    """Colocation implies offloading (explicit ``--no-offload-*`` holds); otherwise inference needs its own slots.

    A critic shares the slots of the actor.
    """
    args.critic_num_nodes, args.critic_num_gpus_per_node = args.actor_num_nodes, args.actor_num_gpus_per_node
    actor_slots = args.actor_num_nodes * args.actor_num_gpus_per_node
    if not args.debug_rollout_only and actor_slots == 0:
        raise ArgumentError(
            f"--actor-num-nodes {args.actor_num_nodes} x --actor-num-gpus-per-node {args.actor_num_gpus_per_node} "
            "leaves no slot to train on; give at least 1 of each, or --debug-rollout-only"
        )
    if args.colocate:
        _share(args)
        if args.rollout_num_gpus is None:
            args.rollout_num_gpus = actor_slots
    elif args.rollout_num_gpus is None and not args.debug_train_only and not args.rollout_external:
        diagnostics.missing_flag(
            args,
            "rollout_num_gpus",
            "--rollout-num-gpus is missing: how many slots generate? With --colocate the training slots do; "
            "with --debug-train-only none does",
            stand_in=args.rollout_num_gpus_per_engine,
        )
    args.rollout_num_engines = (
        len(args.rollout_external_engine_addrs)
        if args.rollout_external_engine_addrs is not None
        else (args.rollout_num_gpus or 0) // args.rollout_num_gpus_per_engine
    )
    args.offload_train = bool(args.offload_train)
    args.offload_rollout = bool(args.offload_rollout)
    _warn_of_pointless_offload(args)
    if args.use_critic:
        args.offload_train = True
    if args.offload_train:
        args.disable_grad_buffers_cpu_backup = args.disable_param_buffers_cpu_backup = True


def _share(args: Args) -> None:
    if not args.release_train:
        args.offload_train = True if args.offload_train is None else args.offload_train
        args.offload_rollout = True if args.offload_rollout is None else args.offload_rollout
        return
    if args.offload_train:
        diagnostics.warn(args, "--offload-train has no effect with --release-train, which ends the trainers instead")
    if args.offload_rollout is False:
        diagnostics.warn(
            args, "--no-offload-rollout is overridden: --release-train with --colocate always offloads the engines"
        )
    args.offload_train, args.offload_rollout = False, True


def _warn_of_pointless_offload(args: Args) -> None:
    if args.colocate or args.debug_rollout_only:
        return
    alone = "training and inference have slots of their own, so no process gets the freed memory"
    for name in ("offload_train", "offload_rollout"):
        if getattr(args, name) and name in args.explicit_flags:
            diagnostics.warn(args, f"--{name.replace('_', '-')} without --colocate: {alone}")


def check_engines(args: Args) -> None:
    """Inference slots must make whole engines, and an engine must fill nodes evenly."""
    if args.debug_train_only or args.rollout_external or args.sglang_config is not None:
        return
    if not args.rollout_num_gpus:
        if args.sglang_router_ip is None and args.num_rollout != 0:
            diagnostics.warn(
                args, "--rollout-num-gpus 0 starts a router and no engine: requests wait until engines register there"
            )
        return
    total, per_engine = args.rollout_num_gpus, args.rollout_num_gpus_per_engine
    if total % per_engine != 0:
        fewer, more = total - total % per_engine, total + per_engine - total % per_engine
        raise ArgumentError(
            f"--rollout-num-gpus {total} is no multiple of --rollout-num-gpus-per-engine {per_engine}; "
            f"use {f'{fewer} or {more}' if fewer else more} slots"
        )
    if per_engine > args.num_gpus_per_node and per_engine % args.num_gpus_per_node != 0:
        raise ArgumentError(
            f"--rollout-num-gpus-per-engine {per_engine} spans nodes and must be a multiple of "
            f"--num-gpus-per-node {args.num_gpus_per_node}"
        )
    if args.colocate:
        _check_shared_slots(args, total, per_engine)


def _check_shared_slots(args: Args, total: int, per_engine: int) -> None:
    """Weights reach a colocated engine from the trainers on all of its slots, or on none."""
    nodes, per_node = args.actor_num_nodes, args.actor_num_gpus_per_node
    if total > nodes * per_node and nodes * per_node % per_engine != 0:
        raise ArgumentError(
            f"with --colocate one engine of --rollout-num-gpus-per-engine {per_engine} slots would lie half on the "
            f"{nodes * per_node} training slots (--actor-num-nodes {nodes} x --actor-num-gpus-per-node {per_node}) and "
            f"half beyond them; use a size that divides {nodes * per_node}"
        )
    if nodes == 1 or per_engine <= 1:
        return
    within, spans = per_engine <= args.num_gpus_per_node, per_engine > per_node
    if within and (spans or per_node % per_engine != 0):
        raise ArgumentError(
            f"with --colocate an engine of --rollout-num-gpus-per-engine {per_engine} slots would lie on two nodes of "
            f"--actor-num-gpus-per-node {per_node} slots, but --num-gpus-per-node {args.num_gpus_per_node} says that "
            f"it fits into one; use a size that divides {per_node}"
            + (f", or --num-gpus-per-node {per_node}" if spans and per_engine % per_node == 0 else "")
        )


_ADDRESS = re.compile(r"(?:http://)?(?P<host>\[[0-9a-fA-F:.]+\]|[^\s:/\[\]@]+):(?P<port>\d{1,5})/?")


def check_deployment(args: Args) -> None:
    """The ways to describe engines exclude each other; addresses of engines elsewhere must be addresses."""
    args.rollout_external = args.rollout_external_engine_addrs is not None
    ways = flags_where(lambda traits: traits.deploys)
    given = [flag.option for flag in reversed(ways) if getattr(args, flag.dest) is not None]
    if len(given) > 1:
        raise ArgumentError(f"{given[0]} and {given[1]} both say which engines there are; leave one of them out")
    args.rollout_external_engine_infos = getattr(args, "rollout_external_engine_infos", None)
    if args.rollout_external_engine_addrs is not None:
        _check_external(args, args.rollout_external_engine_addrs)
    if args.prefill_num_servers is not None:
        _check_prefill(args)


def parse_address(text: str) -> tuple[str, int]:
    """Host (an IPv6 address in brackets) and port of ``host:port`` or ``http://host:port``. Raises ``ValueError``."""
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise ValueError("expected host:port or http://host:port, an IPv6 host in brackets")
    return match["host"], int(match["port"])


def _check_external(args: Args, addresses: Sequence[str]) -> None:
    seen = set()
    for text in addresses:
        try:
            address = parse_address(text)
        except ValueError as error:
            raise ArgumentError(f"--rollout-external-engine-addrs {text}: {error}") from error
        if address in seen:
            raise ArgumentError(f"--rollout-external-engine-addrs names {text} twice; leave one out")
        seen.add(address)
    if args.colocate and not args.debug_rollout_only:
        raise ArgumentError(
            "--rollout-external-engine-addrs names engines on slots of their own, which --colocate cannot share; "
            "leave one of them out"
        )
    if args.offload_rollout and not args.debug_rollout_only and not args.debug_train_only:
        raise ArgumentError(
            "--offload-rollout frees the memory of the run's own engines, and those of --rollout-external-engine-addrs "
            "are others'; leave one of them out"
        )
    if args.dry_run and not args.debug_train_only and args.rollout_external_engine_infos is None:
        diagnostics.unavailable(
            args,
            f"--rollout-external-engine-addrs {' '.join(addresses)}: the engines are asked for their kinds and sizes "
            "when the run starts",
        )


def _check_prefill(args: Args) -> None:
    total = args.rollout_num_gpus
    if total is None and args.colocate:
        total = args.actor_num_nodes * args.actor_num_gpus_per_node
    taken = (args.prefill_num_servers or 0) * args.rollout_num_gpus_per_engine
    if total is not None and taken >= total and not args.debug_train_only:
        raise ArgumentError(
            f"--prefill-num-servers {args.prefill_num_servers} x --rollout-num-gpus-per-engine "
            f"{args.rollout_num_gpus_per_engine} = {taken} slots leave none of --rollout-num-gpus {total} for engines "
            "that decode; lower one or add slots"
        )


def count_engines(args: Args) -> None:
    """Plan the engines as the run does, and count them."""
    if args.rollout_external or args.debug_train_only or models_of(args) is None:
        return
    try:
        args.rollout_num_engines = len(engines_of(args))
    except ArgumentError:
        raise
    except ValueError as error:
        option = f"--sglang-config {args.sglang_config}: " if args.sglang_config is not None else ""
        raise ArgumentError(f"{option}{error}") from error


def check_elastic(args: Args) -> None:
    """The engines that a run starts with are within the bounds of those that may be added and removed."""
    least, most = args.rollout_min_engines, args.rollout_max_engines
    if most is not None and least > most:
        raise ArgumentError(f"--rollout-min-engines {least} is more than --rollout-max-engines {most}")
    if args.custom_engine_scaling_path is not None and (
        args.rollout_external or (args.colocate and args.sglang_config is None)
    ):
        others = "--rollout-external-engine-addrs" if args.rollout_external else "--colocate"
        raise ArgumentError(
            f"--custom-engine-scaling-path starts and removes engines that have slots of their own, and with {others} "
            "there are none; leave one of them out"
        )
    if args.debug_train_only or args.rollout_external:
        return
    for name, count in Counter(engine.model for engine in engines_of(args)).items():
        of_model = "" if name == "default" else f" of model {name}"
        if most is not None and count > most:
            raise ArgumentError(f"--rollout-max-engines {most}: the run starts with {count} engines{of_model}")
        if "rollout_min_engines" in args.explicit_flags and count < least:
            raise ArgumentError(f"--rollout-min-engines {least}: the run starts with {count} engines{of_model}")


def check_models(args: Args) -> None:
    """Of the models of ``--sglang-config`` the first gets the trainer's weights, and no group shares half of its slots.

    Prefill and decode engines of a model go together. Raises ``ArgumentError``.
    """
    models = models_of(args)
    if args.debug_train_only:
        return
    for name in sorted(OF_ENCODERS):
        if f"sglang_{name}" in args.explicit_flags and getattr(args, f"sglang_{name}"):
            _refuse_encoders(args, f"--sglang-{name.replace('_', '-')}: encoder engines", _NO_PUSH)
    if models is None:
        return
    option = f"--prefill-num-servers {args.prefill_num_servers}"
    if args.sglang_config is not None:
        option = f"--sglang-config {args.sglang_config}"
    for model in models:
        for group in model.server_groups:
            _check_encoders(args, option, model, group)
        if model.has_pd_disaggregation:
            _check_disaggregation(args, option, model)
    if any(model.name == "default" for model in models[1:]):
        raise ArgumentError(f"{option}: default is a name of the first model, which rollouts ask; rename the other one")
    if not args.debug_rollout_only:
        _check_updated(args, option, models)
    _check_borders(args, option, models)


def _check_encoders(args: Args, option: str, model: Model, group: ServerGroup) -> None:
    """Engines of a frozen model may have their images encoded by servers that run elsewhere."""
    given = {name for name in OF_ENCODERS if group.overrides.get(name)}
    frozen = not model.update_weights or args.debug_rollout_only
    if group.worker_type == "encoder" or given - LANGUAGE_ONLY or (given and not frozen):
        _refuse_encoders(args, f"{option}: encoder engines (model {model.name})", _START_THEM if frozen else _NO_PUSH)
    elif given and given != LANGUAGE_ONLY:
        raise ArgumentError(
            f"{option}: model {model.name} has engines with {given.pop()} alone; language_only: true and encoder_urls "
            "go together: give both"
        )


_NO_PUSH = "SGLang's encoder server takes no new weights; use regular ones, which encode images too"
_START_THEM = (
    "slime starts none; start them with SGLang (--encoder-only) and give groups of a frozen model (update_weights: "
    "false) the overrides language_only: true and encoder_urls: [...]"
)


def _refuse_encoders(args: Args, what: str, why: str) -> None:
    message = f"{what} are not available yet in this version: {why}"
    if not args.dry_run:
        raise ArgumentError(message)
    args.not_available.append(message)


def _check_disaggregation(args: Args, option: str, model: Model) -> None:
    """Check what prefill and decode engines of one model must agree on, and what is not sent from one to the other."""
    groups = [group for group in model.server_groups if group.worker_type != "placeholder"]
    if any(group.worker_type == "regular" for group in groups):
        raise ArgumentError(
            f"{option}: model {model.name} has regular engines beside prefill and decode engines, and its router sends "
            "requests to the latter only; make them a model of their own"
        )
    for name in ("disaggregation_transfer_backend", "page_size"):
        found = {str(group.overrides.get(name, getattr(args, f"sglang_{name}", None))) for group in groups}
        if len(found) > 1:
            raise ArgumentError(
                f"{option}: the prefill and decode engines of model {model.name} differ in {name} "
                f"({', '.join(sorted(found))}); give all of them the same"
            )
        if found == {"fake"}:
            raise ArgumentError(
                f"{option}: disaggregation_transfer_backend fake carries nothing from prefill to decode engines; use "
                "mooncake or nixl"
            )
    if args.use_rollout_routing_replay and model.update_weights:
        _check_sent_experts(args, option, model.name, groups)


def _check_sent_experts(args: Args, option: str, model: str, groups: Sequence[ServerGroup]) -> None:
    """Every rank of a prefill engine sends the experts of all layers to one rank of the decode engine."""

    def values(name: str) -> set[Any]:
        return {group.overrides.get(name, getattr(args, f"sglang_{name}", None)) for group in groups}

    stages, sizes = values("pp_size") - {None, 1}, {group.num_gpus_per_engine or 1 for group in groups}
    if stages:
        raise ArgumentError(
            f"{option}: prefill and decode engines of model {model} with {max(stages)} pipeline stages (pp_size) know "
            "the experts of a stage's own layers only, and --use-rollout-routing-replay needs those of all; leave "
            "pp_size out, or use --use-routing-replay"
        )
    if len(sizes) > 1 and "nixl" in values("disaggregation_transfer_backend"):
        raise ArgumentError(
            f"{option}: with --use-rollout-routing-replay nixl sends the experts of prompts between engines of one "
            f"size only, and those of model {model} have {' and '.join(map(str, sorted(sizes)))} GPUs; give all groups "
            "the same num_gpus_per_engine, or use mooncake"
        )


def _check_updated(args: Args, option: str, models: Sequence[Model]) -> None:
    updated = [model.name for model in models if model.update_weights]
    if len(updated) > 1:
        raise ArgumentError(
            f"{option}: {' and '.join(updated)} would all get the trainer's weights, and one model can; set "
            "update_weights: false for the others"
        )
    if not updated:
        raise ArgumentError(
            f"{option}: no model gets the trainer's weights (update_weights), so rollouts would never see them; set it "
            f"to true for the first, or give that the model_path {args.hf_checkpoint}"
        )
    if updated != [models[0].name]:
        raise ArgumentError(
            f"{option}: rollouts ask the first model, {models[0].name}, and the trainer's weights go to {updated[0]}; "
            f"list {updated[0]} first"
        )


def _check_borders(args: Args, option: str, models: Sequence[Model]) -> None:
    """A group takes turns with the trainer as a whole, or not at all."""
    layout = layout_of(args)
    first = layout.rollout_offset
    for model in models:
        for group in model.server_groups:
            end = first + group.num_gpus
            if first < layout.trainer_slots < end and group.worker_type != "placeholder":
                raise ArgumentError(
                    f"{option}: a group of model {model.name} lies on slots {first}-{end - 1}, of which only those "
                    f"below {layout.trainer_slots} are the trainer's (--colocate); make it two groups"
                )
            first = end

"""Routing replay: what the routers and the passes must be for their choices to be repeated."""

from __future__ import annotations

from argparse import Namespace

from slime.arguments.errors import ArgumentError


def check(args: Namespace) -> None:
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

"""Which engines a run has: its own, those of a file, prefill and decode engines, or engines started elsewhere."""

from __future__ import annotations

import re
from argparse import Namespace

from slime.arguments import unchecked
from slime.arguments.errors import ArgumentError

_ADDRESS = re.compile(r"(?:http://)?(?P<host>\[[0-9a-fA-F:.]+\]|[^\s:/\[\]@]+):(?P<port>\d{1,5})/?")


def check(args: Namespace) -> None:
    """The ways to describe engines exclude each other; addresses of engines elsewhere must be addresses."""
    args.rollout_external = args.rollout_external_engine_addrs is not None
    ways = {
        "--rollout-external-engine-addrs": args.rollout_external,
        "--sglang-config": args.sglang_config is not None,
        "--prefill-num-servers": args.prefill_num_servers is not None,
    }
    given = [option for option, present in ways.items() if present]
    if len(given) > 1:
        raise ArgumentError(f"{given[0]} and {given[1]} both say which engines there are; leave one of them out")
    args.rollout_external_engine_infos = getattr(args, "rollout_external_engine_infos", None)
    if args.rollout_external:
        _check_external(args)
    if args.prefill_num_servers is not None:
        _check_prefill(args)


def parse_address(text: str) -> tuple[str, int]:
    """Host (an IPv6 address in brackets) and port of ``host:port`` or ``http://host:port``. Raises ``ValueError``."""
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise ValueError("expected host:port or http://host:port, an IPv6 host in brackets")
    return match["host"], int(match["port"])


def _check_external(args: Namespace) -> None:
    seen = set()
    for text in args.rollout_external_engine_addrs:
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
    if getattr(args, "dry_run", False) and not args.debug_train_only and args.rollout_external_engine_infos is None:
        unchecked.missing(
            args,
            f"--rollout-external-engine-addrs {' '.join(args.rollout_external_engine_addrs)}: the engines are asked "
            "for their kinds and sizes when the run starts",
        )


def _check_prefill(args: Namespace) -> None:
    total = args.rollout_num_gpus
    if total is None and args.colocate:
        total = args.actor_num_nodes * args.actor_num_gpus_per_node
    taken = args.prefill_num_servers * args.rollout_num_gpus_per_engine
    if total is not None and taken >= total and not args.debug_train_only:
        raise ArgumentError(
            f"--prefill-num-servers {args.prefill_num_servers} x --rollout-num-gpus-per-engine "
            f"{args.rollout_num_gpus_per_engine} = {taken} slots leave none of --rollout-num-gpus {total} for engines "
            "that decode; lower one or add slots"
        )

"""Sizes of an engine, as SGLang counts them."""

from __future__ import annotations

from argparse import Namespace

from slime.arguments.errors import ArgumentError

ALIASES = {
    "dp": "data_parallel_size",
    "pp": "pipeline_parallel_size",
    "ep": "expert_parallel_size",
    "moe_dp": "moe_data_parallel_size",
}


def derive_sizes(args: Namespace) -> None:
    """``sglang_tp_size`` from the slots of an engine; long and short names of the sizes agree."""
    for short, long in ALIASES.items():
        if hasattr(args, f"sglang_{short}_size"):
            setattr(args, f"sglang_{long}", getattr(args, f"sglang_{short}_size"))
    slots, stages = args.rollout_num_gpus_per_engine, getattr(args, "sglang_pp_size", 1) or 1
    if slots % stages != 0:
        raise ArgumentError(
            f"--rollout-num-gpus-per-engine {slots} cannot hold --sglang-pp-size {stages} equal pipeline stages"
        )
    args.sglang_tp_size = args.sglang_tensor_parallel_size = slots // stages
    dp = getattr(args, "sglang_dp_size", 1) or 1
    if dp > 1 and not args.sglang_enable_dp_attention:
        raise ArgumentError(f"--sglang-dp-size {dp} needs --sglang-enable-dp-attention")
    if dp > args.sglang_tp_size or args.sglang_tp_size % dp != 0:
        raise ArgumentError(
            f"--sglang-dp-size {dp} must divide the tensor-parallel size {args.sglang_tp_size} of an engine "
            "(--rollout-num-gpus-per-engine / --sglang-pp-size)"
        )
    address = args.sglang_router_ip
    if address is not None and ":" in address and not address.startswith("["):
        args.sglang_router_ip = f"[{address}]"
    if address is not None and args.sglang_router_port is None:
        raise ArgumentError(f"--sglang-router-ip {address} names a running router and needs --sglang-router-port")

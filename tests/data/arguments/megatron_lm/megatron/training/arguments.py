"""A small parser written the way Megatron-LM's training scripts write theirs, with one of each kind of flag."""

import argparse
import enum


class AttnBackend(enum.Enum):
    flash = 1
    fused = 2
    auto = 5


def moe_freq_type(x):
    if isinstance(x, int):
        return x
    assert isinstance(x, str)
    if "[" in x:
        return eval(x)
    return int(x)


def tuple_type(x):
    if x is None or isinstance(x, tuple):
        return x
    return tuple(int(i) for i in x.strip("()").split(","))


def add_megatron_arguments(parser: argparse.ArgumentParser):
    parser = _add_network_size_args(parser)
    parser = _add_training_args(parser)
    return _add_moe_args(parser)


def parse_args(extra_args_provider=None, ignore_unknown_args=False):
    parser = argparse.ArgumentParser(description="Megatron-LM Arguments", allow_abbrev=False)
    parser = add_megatron_arguments(parser)
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    return parser.parse_known_args()[0] if ignore_unknown_args else parser.parse_args()


def _add_network_size_args(parser):
    group = parser.add_argument_group(title="network size")
    group.add_argument("--num-layers", type=int, default=None, help="Number of transformer layers.")
    group.add_argument(
        "--attention-backend",
        type=lambda attn_backend: AttnBackend[attn_backend],
        default=AttnBackend.auto,
        choices=list(AttnBackend),
        help="Attention backend to use (flash,fused,unfused,local,auto). Defaults to auto",
    )
    group.add_argument("--window-size", type=tuple_type, default=None, help="Window size (left, right).")
    group.add_argument("--norm-epsilon", type=float, default=1e-6, help="Epsilon for layer norm and RMS norm.")
    group.add_argument("--apply-layernorm-1p", action="store_true", help="Adjust LayerNorm weights.")
    group.add_argument("--swiglu", action="store_true", help="Use gated linear units and SiLU activation.")
    group.add_argument(
        "--disable-bias-linear", action="store_false", help="Disable bias in linear layers", dest="add_bias_linear"
    )
    group.add_argument("--spec", type=str, default=None, nargs="*", help="Specify the <module_location, function>.")
    return parser


def _add_training_args(parser):
    group = parser.add_argument_group(title="training")
    group.add_argument("--lr", type=float, default=None, help="Initial learning rate.")
    group.add_argument("--log-throughput", action="store_true", help="If set, calculate and log throughput per GPU.")
    group.add_argument("--fp8-format", default=None, choices=["e4m3", "hybrid"], help="Which fp8 format.", dest="fp8")
    group.add_argument("--ckpt-format", default="torch_dist", choices=["torch", "torch_dist", "newest"])
    group.add_argument("--recompute-modules", nargs="*", type=str, default=None, help="Modules to recompute.")
    group.add_argument("--use-cpu-initialization", action="store_true", default=None)
    group.add_argument("--seeds", type=eval, default=[1, 2], help="A list, or 50% of one.")
    group.add_argument("--new-loss-trick", type=float, default=0.5, help="Not known elsewhere: %(default)s.")
    group.add_argument("--nightly", action=argparse.BooleanOptionalAction, default=True)
    group.add_argument("--enable-msc", action="store_true", default=True)
    group.add_argument("--disable-msc", action="store_false", dest="enable_msc")
    return parser


def _add_moe_args(parser):
    group = parser.add_argument_group(title="moe")
    group.add_argument("--num-experts", type=int, default=None, help="Number of Experts in MoE (None means no MoE)")
    group.add_argument("--moe-layer-freq", type=moe_freq_type, default=1, help="Frequency between MoE layers.")
    group.add_argument("--moe-router-topk", type=int, default=4, help="Number of experts to route to for each token.")
    group.add_argument("--fp4-param-gather", action="store_true", help="Keep the compute param in fp4.")
    return parser

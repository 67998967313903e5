"""Matrix products of the trainer in FP8, which TransformerEngine computes."""

from __future__ import annotations

from fnmatch import fnmatchcase

from slime.arguments.args import Args
from slime.arguments.errors import ArgumentError

DETAILS = ("fp8_*", "tp_only_amax_red", "first_last_layers_bf16", "num_layers_at_*_in_bf16")
"""Attributes of the flags that say something of --fp8-format."""
ROWS = {"blockwise": 128, "mxfp8": 32}
"""Recipe -> what the tokens of a product are a multiple of; 16 with the others."""


def check(args: Args) -> None:
    """Refuse what TransformerEngine could not compute; that it is installed is seen where the trainers start."""
    args.fp8_param_gather = False  # without effect, as a warning has said
    if args.fp8 is None:
        names = (name for name in sorted(args.explicit_flags) if any(fnmatchcase(name, part) for part in DETAILS))
        if name := next(names, None):
            option = "--no-fp8-wgrad" if name == "fp8_wgrad" else "--" + name.replace("_", "-")
            raise ArgumentError(f"{option} says how --fp8-format computes, which is not given; add it, or leave it out")
        return
    if args.debug_rollout_only:
        return
    if args.transformer_impl != "transformer_engine":
        raise ArgumentError(
            f"--fp8-format {args.fp8}: TransformerEngine computes products in FP8, and --transformer-impl is "
            f"{args.transformer_impl}; leave one of them out"
        )
    if args.fp16 or args.fp32:
        raise ArgumentError(
            f"--fp8-format {args.fp8} goes with weights in bf16, got --{'fp16' if args.fp16 else 'fp32'}; leave it out"
        )
    rows, multiple = ROWS.get(args.fp8_recipe, 16), args.data_pad_size_multiplier
    if multiple % rows:
        raise ArgumentError(
            f"--fp8-recipe {args.fp8_recipe} needs tokens in multiples of {rows}: --data-pad-size-multiplier is "
            f"{multiple}; give a multiple of {rows}"
        )

"""Top-p replay: what engines must be able to tell, so that training knows which tokens each one was sampled among."""

from __future__ import annotations

from argparse import Namespace

from slime.arguments.errors import ArgumentError
from slime.arguments.rules.rollout import SFT_ROLLOUT

FEWEST = 4
"""Half of it is the least top-k under which anything is sampled."""


def check(args: Namespace) -> None:
    """Refuse with ``--rollout-top-p`` below 1 what SGLang reports no top-p masks with: it would refuse every request.

    Of engines that run elsewhere only they know.
    """
    if args.rollout_top_p == 1.0:
        return
    option = f"--rollout-top-p {args.rollout_top_p}"
    if args.rollout_function_path == SFT_ROLLOUT:
        raise ArgumentError(f"{option} has no meaning for {SFT_ROLLOUT}, which samples nothing; leave it out")
    if args.debug_train_only or args.rollout_external:
        return
    if not hasattr(args, "sglang_sampling_mask_max_tokens"):
        raise ArgumentError(
            f"{option}: the trainer must know which tokens each one was sampled among, and the installed SGLang does "
            "not report that (it has no --sampling-mask-max-tokens); install 0.5.20, or leave --rollout-top-p out"
        )
    largest = args.sglang_sampling_mask_max_tokens
    if args.rollout_top_k == -1 and largest < FEWEST:
        raise ArgumentError(
            f"--sglang-sampling-mask-max-tokens {largest}: with {option} training requests sample among at most half "
            f"as many tokens, which leaves no choice; give at least {FEWEST} (SGLang's own is 4096), or a "
            "--rollout-top-k"
        )
    if args.rollout_top_k > largest:
        raise ArgumentError(
            f"--rollout-top-k {args.rollout_top_k}: with {option} engines report the tokens that each one was sampled "
            f"among, at most --sglang-sampling-mask-max-tokens {largest}; lower the one or raise the other"
        )
    for name, value in (("speculative_algorithm", None), ("sampling_backend", "ascend")):
        given = getattr(args, f"sglang_{name}", None)
        if given is not None and value in (None, given):
            raise ArgumentError(
                f"{option}: SGLang does not report which tokens each one was sampled among with "
                f"--sglang-{name.replace('_', '-')} {given}; leave one of them out"
            )

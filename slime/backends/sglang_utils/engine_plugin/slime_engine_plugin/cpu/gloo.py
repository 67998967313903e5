"""One polling thread for all gloo groups of an engine process: SGLang makes a dozen, most of one rank."""

from __future__ import annotations


def register() -> None:
    """Share the device before SGLang makes its first group."""
    from slime.utils.distributed_utils import share_gloo_device

    share_gloo_device()

"""What slime adds to a stock SGLang server, through SGLang's own plugin framework (``sglang.srt.plugins``).

The directory that holds this package is on the ``PYTHONPATH`` of engine processes only; SGLang finds the entry point in
the ``.dist-info`` beside it and calls :func:`register` in each of its processes. Each module says what it
hooks and why.
"""

from __future__ import annotations


def register() -> None:
    """Register all hooks that apply on this machine."""
    import os

    import torch

    from slime_engine_plugin import attention, cpu, files, pause, request_fields, sampler, start

    on_cpu = not torch.cuda.is_available()
    pause.register()
    request_fields.register()
    start.register(on_cpu)
    files.register()
    if on_cpu:
        cpu.register()
        if os.environ.get("SLIME_STOCK_CPU_ATTENTION", "0") in ("", "0"):  # to compare with
            sampler.register()
            attention.register()

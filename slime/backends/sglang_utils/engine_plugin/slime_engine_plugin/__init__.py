"""What slime adds to a stock SGLang server, through SGLang's own plugin framework (``sglang.srt.plugins``).

The directory that holds this package is on the ``PYTHONPATH`` of engine processes only; SGLang finds the entry point in
the ``.dist-info`` beside it and calls :func:`register` in each of its processes. See ``pause.py``, ``cpu.py``,
``asked.py`` and ``start.py`` for the hooks and the reason for each.
"""

from __future__ import annotations


def register() -> None:
    """Register all hooks that apply on this machine."""
    import torch

    from slime_engine_plugin import asked, cpu, files, pause, start

    on_cpu = not torch.cuda.is_available()
    pause.register()
    asked.register()
    start.register(on_cpu)
    files.register()
    if on_cpu:
        cpu.register()

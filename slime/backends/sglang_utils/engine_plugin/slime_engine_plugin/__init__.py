"""Additions of slime to a stock SGLang server, through SGLang's own plugin framework (``sglang.srt.plugins``).

The directory that holds this package is on the ``PYTHONPATH`` of engine processes only; SGLang finds the entry point in
the ``.dist-info`` beside it and calls :func:`register` in each of its processes. Each module says what it
hooks and why.
"""

from __future__ import annotations

from collections.abc import Iterable

FASTER_ON_CPU = ("cpu.attention", "cpu.sampler", "cpu.elementwise", "cpu.decoder", "cpu.gloo")
"""Modules that compute on a CPU what SGLang computes too."""


def register() -> None:
    """Register all hooks that apply on this machine."""
    import os

    import torch

    from slime_engine_plugin.cpu import cuda_assumptions, disaggregation, quantized
    from slime_engine_plugin.server import files, keys, pause, prompt_experts, rendezvous, request_fields, start
    from slime_engine_plugin.weights import repacked

    on_cpu = not torch.cuda.is_available()
    pause.register(on_cpu)
    request_fields.register()
    prompt_experts.register()
    start.register(on_cpu)
    files.register()
    keys.register()
    rendezvous.register()
    repacked.register(on_cpu)
    if os.environ.get("SLIME_TAKES_ADAPTERS") == "1":
        from slime_engine_plugin.weights import adapters

        adapters.register(on_cpu)
    if on_cpu:
        cuda_assumptions.register()
        disaggregation.register()
        quantized.register()
        register_if_it_fits(
            ["cpu.latent", "cpu.delta_nets", "cpu.minimax_m2", "cpu.sparse", "cpu.windows"],
            "models of these families fail",
        )
        if os.environ.get("SLIME_STOCK_CPU_ATTENTION", "0") in ("", "0"):  # to compare with
            register_faster_on_cpu()
    register_if_it_fits(
        ["weights.drafts", "weights.changes"], "pushes of changes fail, and a broadcast leaves draft layers out"
    )
    register_if_it_fits(["server.gemma4"], "Gemma 4 fails without a tower")
    register_if_it_fits(["weights.p2p"], "--update-weight-transport p2p fails")
    register_if_it_fits(
        ["weights.features"], "after pushes images that were seen before have the features of old weights"
    )


def register_faster_on_cpu() -> None:
    """Register what is faster on a CPU."""
    register_if_it_fits(FASTER_ON_CPU, "SGLang's own is used, which is slower")


def register_if_it_fits(names: Iterable[str], otherwise: str) -> None:
    """Register modules; what does not fit the installed SGLang is left to SGLang, with one warning."""
    import importlib
    import logging

    from slime_engine_plugin.hook_points import OtherSGLangError

    for name in names:
        try:
            importlib.import_module(f"slime_engine_plugin.{name}").register()
        except (ImportError, AttributeError, OtherSGLangError) as e:
            logging.getLogger(__name__).warning(
                "slime's %s for engines does not fit this SGLang (%s): %s", name, e, otherwise,
            )  # fmt: skip

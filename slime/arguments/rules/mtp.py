"""Multi-token prediction layers (``--mtp-num-layers``)."""

from __future__ import annotations

import re
from typing import Any

from slime.arguments import diagnostics
from slime.arguments.args import Args
from slime.arguments.errors import ArgumentError
from slime.models import facts

_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


def check(args: Args) -> None:
    """Layers that are trained must exist; a pipeline layout has them where they are run."""
    if args.enable_mtp_training and args.mtp_num_layers is None:
        raise ArgumentError("--enable-mtp-training needs --mtp-num-layers, the number of MTP layers to train")
    if args.mtp_num_layers is None:
        return
    layout, count = args.pipeline_model_parallel_layout, args.mtp_num_layers
    if layout is not None and not re.fullmatch(rf"[^m]*(m{{{count}}}|\(?m\)?\*{count})L", re.sub(r"[,\s]", "", layout)):
        raise ArgumentError(
            f"--pipeline-model-parallel-layout {layout}: the layers of --mtp-num-layers {count} are run by the last "
            f"stage; let it end with {'m' * count}L"
        )
    drafts = args.enable_mtp_training and args.sglang_speculative_algorithm is not None
    if drafts and not args.colocate and args.update_weight_transport != "disk":
        diagnostics.warn(
            args,
            "--enable-mtp-training: engines get weights by broadcast, which SGLang gives to the model and not to the "
            "draft model of --sglang-speculative-algorithm: it keeps drafting with the layers it was loaded with. "
            "--colocate and --update-weight-transport disk update both",
        )


def differences(args: Args, config: dict[str, Any]) -> list[str]:
    """Return the difference between ``--mtp-num-layers`` and ``config``, at most one phrase."""
    wanted = args.mtp_num_layers
    if wanted is None:
        return []
    family = facts.family_of(config) or {}
    if family.get("mtp_layers") is None:
        if args.custom_model_provider_path:
            return []  # a model of the user's own
        return [f"--mtp-num-layers is {wanted} but the MTP layers of {config.get('model_type')} are not supported"]
    key = next((key for key in _COUNTS if config.get(key) is not None), None)
    there = config[key] if key else family["mtp_layers"]
    if wanted == there:
        return []
    said = f"{key} is {there}" if key else f"the checkpoint has {there}"
    return [f"--mtp-num-layers is {wanted} but {said}"]

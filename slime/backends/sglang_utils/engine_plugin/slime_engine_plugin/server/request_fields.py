"""Set request fields that the router does not forward.

sglang-router 0.3.2 passes on the fields of ``/generate`` that it knows. It drops ``return_sampling_mask``,
``return_routed_experts`` and ``sampling_params.custom_params``, and a request silently gets a reply without the
sampling mask or experts that it asked for. It does pass on ``custom_labels``, which SGLang itself reads for metrics
only, and only those that it is configured for: an entry ``slime_<field>`` there sets the field. Engines that get
requests directly also read ``custom_params``. It drops ``sampling_params.logit_bias`` too: the ids that an entry
``slime_forbidden_ids`` names are not sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GenerateReqInput

LABELS = {f"slime_{field}": field for field in ("return_sampling_mask", "return_routed_experts")}
"""Entries of ``custom_labels`` -> fields of the request that they set."""
FORBIDDEN_IDS, FORBIDDEN = "slime_forbidden_ids", -1000.0
"""The entry of ``custom_labels`` with ids that no request may sample, and what is added to their logits."""
CUSTOM_PARAMS = {"return_top_p_token_ids": "return_sampling_mask"}
"""Entries of ``custom_params`` -> fields of the request that they set."""


def read_request_fields(
    normalize: Callable[..., Any], request: GenerateReqInput, *args: object, **kwargs: object
) -> Any:
    """Around ``GenerateReqInput.normalize_batch_and_arguments``: take the entries out and set the fields."""
    if isinstance(request.custom_labels, dict):
        _move(request.custom_labels, LABELS, request)
        _forbid(request.custom_labels.pop(FORBIDDEN_IDS, ""), request)
        request.custom_labels = request.custom_labels or None
    params = request.sampling_params
    if isinstance(params, dict) and isinstance(params.get("custom_params"), dict):
        _move(params["custom_params"], CUSTOM_PARAMS, request)
        if not params["custom_params"]:
            del params["custom_params"]
    return normalize(request, *args, **kwargs)


def _move(entries: dict[str, Any], fields: dict[str, str], request: GenerateReqInput) -> None:
    for name, field in fields.items():
        if entries.pop(name, False):
            setattr(request, field, True)


def _forbid(ids: str, request: GenerateReqInput) -> None:
    if ids:
        every = (
            request.sampling_params if isinstance(request.sampling_params, list) else [request.sampling_params or {}]
        )
        for params in every:
            params["logit_bias"] = {**(params.get("logit_bias") or {}), **dict.fromkeys(ids.split(","), FORBIDDEN)}
        if not isinstance(request.sampling_params, list):
            request.sampling_params = every[0]


def register() -> None:
    """Register the hook."""
    HookRegistry.register(
        "sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments",
        read_request_fields,
        HookType.AROUND,
    )

"""Ranks of ``tests/integration/test_fake_quantization.py``."""

from __future__ import annotations

from typing import Any

from tests.support.megatron_model import hf_gradients, model_args, run_pack
from tests.support.ranks import loaded_model, switch_layout


def passes(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what each case computes with ``weights`` on the model that ``checkpoint`` and ``flags`` make.

    Logits, gradients, and the weights that would be pushed.
    """
    from slime.backends.megatron_utils.weights import iter_hf_weights

    results = []
    for case in cases:
        args = model_args(case["checkpoint"], *case["flags"])
        args.use_distributed_optimizer = False  # so that every rank has all gradients
        switch_layout(args)
        model = loaded_model(args, case["weights"])
        forward = run_pack(model, args)
        pushed = {name: tensor.clone() for name, tensor in iter_hf_weights(model, args, gather_pp=True)}
        results.append({"forward": forward, "pushed": pushed, "gradients": dict(hf_gradients(model, args))})
    return results

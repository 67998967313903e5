"""Ranks of ``tests/integration/test_fake_quantization.py``."""

from __future__ import annotations

from typing import Any

from tests.support.megatron_model import hf_gradients, model_args, run_pack, switch_layout


def passes(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what each case computes with ``weights`` on the model that ``checkpoint`` and ``flags`` make.

    Logits, gradients, and the weights that would be pushed.
    """
    from slime.backends.megatron_utils.model.provider import get_model
    from slime.backends.megatron_utils.weights import iter_hf_weights, load_hf

    results = []
    for case in cases:
        args = model_args(case["checkpoint"], *case["flags"])
        args.use_distributed_optimizer = False  # so that every rank has all gradients
        switch_layout(args)
        model = get_model(args)
        load_hf(model, case["weights"], args)
        forward = run_pack(model, args)
        pushed = {name: tensor.clone() for name, tensor in iter_hf_weights(model, args, gather_pp=True)}
        results.append({"forward": forward, "pushed": pushed, "gradients": dict(hf_gradients(model, args))})
    return results

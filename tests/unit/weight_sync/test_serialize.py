"""The request body of the colocated transport can be read by SGLang's own unpickler rules."""

from __future__ import annotations

import base64
import io
import pickle
from typing import Any

import torch

from slime.weight_sync.buckets import iter_buckets
from slime.weight_sync.tensor import serialize

# Modules whose classes the engine's unpickler accepts (SGLang 0.5.20, SafeUnpickler), as far as they are used here.
ACCEPTED = ("builtins", "collections", "types", "torch")


class EngineUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] not in ACCEPTED:
            raise AssertionError(f"{module}.{name} would be refused by the engine")
        return super().find_class(module, name)


def test_the_body_holds_the_tensors_and_only_accepted_classes() -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(4).to(torch.bfloat16)}
    (bucket,) = iter_buckets(tensors.items(), 10**6)
    body = EngineUnpickler(io.BytesIO(base64.b64decode(serialize(bucket.flatten(), bucket)))).load()
    flat = body["flattened_tensor"]
    for meta in body["metadata"]:
        again = flat[meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape)
        assert torch.equal(again, tensors[meta.name])
        assert meta.numel == meta.end_idx - meta.start_idx


def test_the_body_shares_no_memory_with_the_sender() -> None:
    weight = torch.ones(4)
    (bucket,) = iter_buckets([("w", weight)], 10**6)
    text = serialize(bucket.flatten(), bucket)
    weight.zero_()
    body = EngineUnpickler(io.BytesIO(base64.b64decode(text))).load()
    assert body["flattened_tensor"].view(torch.float32).tolist() == [1.0] * 4

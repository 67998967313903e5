"""Hugging Face weights to Megatron and back, by one declarative map per model family (``maps``)."""

from __future__ import annotations

from slime.backends.megatron_utils.weights.export import export_hf
from slime.backends.megatron_utils.weights.iterate import describe_hf_weights, iter_hf_weights
from slime.backends.megatron_utils.weights.load import load_hf

__all__ = ["describe_hf_weights", "export_hf", "iter_hf_weights", "load_hf"]

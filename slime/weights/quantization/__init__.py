"""Weights in 8 and 4 bits, as Hugging Face checkpoints and SGLang have them: one quantizer for files and for pushes."""

from __future__ import annotations

from slime.weights.quantization.formats import Format, Fp8, Int4
from slime.weights.quantization.quantizer import Quantizer, read_format

__all__ = ["Format", "Fp8", "Int4", "Quantizer", "read_format"]

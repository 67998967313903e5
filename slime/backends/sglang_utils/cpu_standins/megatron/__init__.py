"""Hides Megatron: SGLang's debugging tools import it where it is installed, for 1.5 seconds of every engine's start."""

raise ImportError("engines on a CPU start without Megatron")

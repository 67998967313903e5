"""Flags of installed packages, read from the packages themselves: Megatron, SGLang and its router."""

"""Faster kernels and stand-ins on a CPU."""

"""Weights written straight into the memory of engines: where each element goes, and what carries it."""

"""Checkpoints of trainers: formats, digests, conversion."""

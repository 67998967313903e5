"""Correcting the mismatch between the engine that samples and the trainer that learns."""

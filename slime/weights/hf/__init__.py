"""Hugging Face checkpoints: index, tensors, writing."""

"""Helpers of programs around a run: scripts that prepare checkpoints and data, and start training."""

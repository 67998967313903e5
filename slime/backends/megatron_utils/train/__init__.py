"""The training process: batches, log-probs, losses, steps, metrics."""

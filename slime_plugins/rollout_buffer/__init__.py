"""A stand-alone HTTP buffer between generators of trajectories, which may be anything, and a training run."""

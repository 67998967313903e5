"""slime: reinforcement-learning post-training for large language models."""

from slime.compat import old_paths

__version__ = "0.4.0"

old_paths.install()

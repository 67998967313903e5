"""Stand-in engines and arguments that point to them, as the tests of rollouts have them."""

from tests.unit.rollout.conftest import cluster, make_args, tokenizer

__all__ = ["cluster", "make_args", "tokenizer"]

"""The groups of the fully asynchronous rollout, from their prompts to their consumption."""

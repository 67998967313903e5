"""Low-rank adapters (LoRA): the base model stays as it is, and a few numbers per linear layer are trained."""

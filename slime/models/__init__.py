"""Facts about published models, and the translation of a Hugging Face config into Megatron's flags."""

"""What is known of published models, and how a Hugging Face config is said in Megatron's flags."""

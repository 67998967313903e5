"""The quickstart: a tiny model from nothing, taught by SFT and then by GRPO through slime's real loop."""

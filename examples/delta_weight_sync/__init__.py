"""Engines that get only the weights that changed, over a shared directory."""

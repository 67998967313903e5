"""Paths and calls of slime <= 0.3.1. Nothing but ``import slime`` and users' code imports this package."""

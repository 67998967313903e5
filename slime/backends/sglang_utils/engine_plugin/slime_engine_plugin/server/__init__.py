"""The engine's server and its requests."""

"""The driver process."""

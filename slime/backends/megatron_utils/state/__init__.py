"""Parallel groups, optimizer and the memory they take."""

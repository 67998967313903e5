"""A coding agent in sandboxes, rewarded when the tests of a repository pass with its changes."""

"""Agents as policies: gateways that agents talk to as if to a provider, and the training samples of what was said."""

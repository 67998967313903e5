"""Agents as policies: gateways with the APIs of providers, and the training samples of the conversations."""

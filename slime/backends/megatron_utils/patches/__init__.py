"""Patches of stock packages for this machine: the adapter for CPUs, fixes of one version."""

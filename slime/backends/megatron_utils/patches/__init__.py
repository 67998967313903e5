"""What stock packages need on this machine: the adapter for CPUs, repairs of one version."""

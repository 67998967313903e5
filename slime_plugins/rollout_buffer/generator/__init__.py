"""Generators: modules with ``TASK_TYPE`` and ``run_rollout(data)``. A module that is put here is found by its type."""

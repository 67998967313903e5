"""Per-role overrides of the arguments (``--megatron-config-path``)."""

from __future__ import annotations

import copy
import logging
from argparse import Namespace
from typing import Any

from slime.arguments.errors import ArgumentError
from slime.arguments.files.custom_config import read_mapping

PLACEMENT_KEYS = frozenset({"num_nodes", "num_gpus_per_node"})
ENTRY_KEYS = frozenset({"name", "role", "overrides", "args"})
CRITIC_VALUES: dict[str, Any] = {
    "kl_coef": 0,
    "use_opd": False,
    "custom_advantage_function_path": None,
    "untie_embeddings_and_output_weights": True,
}
logger = logging.getLogger(__name__)


def parse_megatron_role_args(base_args: Namespace, path: str | None, role: str) -> Namespace:
    """A copy of ``base_args`` with the overrides that the YAML file ``path`` has for ``role``.

    A role without an entry inherits everything. A text value is converted to the type of an existing number. The critic
    always gets ``CRITIC_VALUES``, and its parameters keep a CPU copy unless overridden. Raises ``ArgumentError``.
    """
    args = copy.deepcopy(base_args)
    overrides = _overrides(path, role) if path is not None else {}
    for name, value in overrides.items():
        if name in PLACEMENT_KEYS:
            logger.warning("%s: %s of role %s is ignored; roles share the actor's placement", path, name, role)
            continue
        if not hasattr(args, name):
            logger.warning("%s: role %s sets %s, which no flag is named after", path, role, name)
        setattr(args, name, _typed(value, getattr(args, name, None), f"{path}: role {role}: {name}"))
    if role == "critic":
        for name, value in CRITIC_VALUES.items():
            setattr(args, name, value)
        if "disable_param_buffers_cpu_backup" not in overrides:
            args.disable_param_buffers_cpu_backup = False
    return args


def _overrides(path: str, role: str) -> dict[str, Any]:
    entries = read_mapping(path, "--megatron-config-path").get("megatron")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ArgumentError(f"--megatron-config-path {path}: expected a list of roles under the key `megatron`")
    mine = [entry for entry in entries if entry.get("role") == role]
    if len(mine) > 1:
        raise ArgumentError(f"--megatron-config-path {path}: role {role} appears {len(mine)} times; merge its entries")
    if not mine:
        return {}
    unknown = sorted(set(mine[0]) - ENTRY_KEYS)
    if unknown:
        raise ArgumentError(f"--megatron-config-path {path}: role {role}: unknown keys {', '.join(unknown)}")
    overrides = mine[0].get("overrides", mine[0].get("args")) or {}
    if not isinstance(overrides, dict):
        raise ArgumentError(f"--megatron-config-path {path}: role {role}: overrides must be a mapping")
    return {str(name).replace("-", "_"): value for name, value in overrides.items()}


def _typed(value: Any, existing: Any, where: str) -> Any:
    if not isinstance(value, str) or isinstance(existing, bool) or not isinstance(existing, int | float):
        return value
    try:
        return type(existing)(value)
    except ValueError as error:
        raise ArgumentError(f"{where}: expected {type(existing).__name__}, got {value!r}") from error

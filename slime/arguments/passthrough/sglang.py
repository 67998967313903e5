"""SGLang's server flags with the prefix ``--sglang-``."""

from __future__ import annotations

from typing import Any

from slime.arguments.flag import Flag
from slime.arguments.passthrough import catalog

# Owned by slime: it sets them for every engine itself.
EXCLUDED = frozenset(
    {
        "model_path", "config", "trust_remote_code", "random_seed", "enable_memory_saver", "tp_size", "port", "nnodes",
        "node_rank", "dist_init_addr", "gpu_id_step", "base_gpu_id", "nccl_port", "skip_server_warmup",
        "enable_return_routed_experts",
    }
)  # fmt: skip


def flag_of_record(record: dict[str, Any], *, prefix: str, source: str, group: str) -> Flag:
    """Turn a parser record into a flag; ``prefix`` (``sglang``) goes in front of every option and of the attribute."""

    def prefixed(option: str) -> str:
        return "--" + prefix + "-" + option.lstrip("-") if prefix else option

    return Flag(
        dest=f"{prefix}_{record['dest']}" if prefix else record["dest"],
        options=tuple(prefixed(o) for o in record["options"]),
        default=record["default"],
        kind=record["kind"],
        action=record["action"],
        nargs=record["nargs"],
        const=record["const"],
        choices=tuple(record["choices"]) if record["choices"] else None,
        help=record["help"],
        group=group,
        source=source,
        field=record["dest"],
    )


def sglang_flags() -> list[Flag]:
    """Every flag of the installed SGLang server that slime does not set itself; ``field`` is SGLang's own name."""
    records = [r for r in catalog.records(catalog.SGLANG) if r["dest"] not in EXCLUDED]
    return [flag_of_record(r, prefix="sglang", source="sglang", group="SGLang server") for r in records]


def server_words(field: str, value: Any) -> list[str]:
    """The words of SGLang's own command line that set ``field`` (``mem_fraction_static``) to ``value``.

    Serves engines started as ``python -m sglang.launch_server``. An empty list means: leave the flag out. Raises
    ``KeyError`` when the installed SGLang has no such field.
    """
    import json

    record = _records_by_field()[field]
    option = record["options"][0]
    if record["action"] == "tristate":
        return [] if value is None else [option if value else record["options"][1]]
    if record["action"] in ("true", "false"):
        return [option] if value == (record["action"] == "true") else []
    if value is None:
        return []
    if record["kind"] == "json":
        return [option, json.dumps(value)]
    if isinstance(value, list | tuple):
        return [option, *map(str, value)]
    return [option, str(value)]


def _records_by_field() -> dict[str, dict[str, Any]]:
    return {r["dest"]: r for r in catalog.records(catalog.SGLANG)}

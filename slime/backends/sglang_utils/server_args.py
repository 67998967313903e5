"""The command line of an engine: what slime decides, and every ``--sglang-*`` flag that the user set."""

from __future__ import annotations

import importlib.util
import json
import logging
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime.arguments.args import Args
from slime.arguments.passthrough import catalog
from slime.arguments.rules.lora import adapted_modules, takes_adapters
from slime.backends.sglang_utils.errors import EngineStartError

logger = logging.getLogger(__name__)

Record = Mapping[str, Any]

LOADING_DEADLINE_S = 120.0
NOT_FORWARDED = frozenset({"config", "help"})
"""``config`` would replace the whole command line; the flags below it say the same thing one by one."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """One node of one engine, as the run places it.

    Attributes:
        rank: number of the engine process among all of the run (seeds its sampling).
        host: address to bind.
        port: HTTP port.
        nccl_port: port of the engine's own process group.
        num_gpus: GPUs of the whole engine; without CUDA, processes.
        base_gpu_id: first GPU of this node that the engine uses.
        dist_init_addr: ``host:port`` of the engine's node 0, for an engine that spans nodes.
        nnodes: nodes of the engine.
        node_rank: which of them this is.
        model_path: checkpoint to load.
        worker_type: ``regular``, ``prefill``, ``decode`` or ``encoder``.
        bootstrap_port: of a prefill worker.
        update_weights: whether it gets the trainer's weights, or keeps those of its checkpoint.
        offload: whether it releases its memory while the trainer trains; None: as ``--offload-rollout`` says.
        overrides: SGLang fields that win over the run's flags (from a deployment file).
    """

    rank: int
    host: str
    port: int
    nccl_port: int
    num_gpus: int
    model_path: str
    base_gpu_id: int = 0
    dist_init_addr: str | None = None
    nnodes: int = 1
    node_rank: int = 0
    worker_type: str = "regular"
    bootstrap_port: int | None = None
    update_weights: bool = True
    offload: bool | None = None
    overrides: Mapping[str, Any] | None = None


def build_server_args(args: Args, spec: EngineSpec, *, records: Sequence[Record] | None = None) -> list[str]:
    """Return the command that starts one node of one engine: ``python -m sglang.launch_server ...``.

    Args:
        args: the run's arguments. Its ``sglang_*`` attributes that differ from SGLang's defaults are forwarded.
        spec: the engine.
        records: SGLang's argument list; default: that of the installed version.

    The API key is not on the command line, where every user of the host could read it: see :func:`secret_fields`.

    Raises:
        ValueError: the installed SGLang lacks a field that slime sets, or the sizes do not fit together.
    """
    records = catalog.records(catalog.SGLANG) if records is None else records
    by_dest = {r["dest"]: r for r in records}
    fields = forwarded_fields(args, records)
    fields.update(_owned_fields(args, spec))
    fields.update(_worker_fields(spec))
    if spec.worker_type == "decode":
        fields.pop("enable_hierarchical_cache", None)
    if spec.worker_type not in ("prefill", "decode"):
        fields.pop("disaggregation_transfer_backend", None)
    overrides = dict(spec.overrides or {})
    if lacking := [name for name in overrides if name not in by_dest]:
        logger.warning("SGLang has no argument %s: the engine does without it", ", ".join(lacking))
    fields.update({name: value for name, value in overrides.items() if name in by_dest})
    if fields.get("enable_memory_saver"):
        # SGLang's default on CUDA, breakable graphs, ends an engine at its start that can release its graphs.
        fields.setdefault("cuda_graph_backend_prefill", "disabled")
        if fields.get(
            "speculative_algorithm"
        ):  # pushes may leave the draft model out, and nothing else sends its weights
            fields["enable_draft_weights_cpu_backup"] = True
    for name in ("api_key", "admin_api_key"):
        fields.pop(name, None)
    unknown = sorted(set(fields) - set(by_dest))
    if unknown:
        raise ValueError(
            f"SGLang {catalog.installed_version(catalog.SGLANG)} has no argument {', '.join(unknown)}. Expected names "
            "of its server arguments (underscores, no prefix); see `python -m sglang.launch_server --help`."
        )
    command = [sys.executable, "-m", "sglang.launch_server"]
    for name, value in fields.items():
        command += flag_words(by_dest[name], value)
    return command


def secret_fields(args: Args) -> dict[str, str]:
    """Return the fields that go into a private file instead of the command line.

    None with several tokenizer processes: SGLang does not start them with a key.
    """
    if has_no_key(args):
        return {}
    fields = {"api_key": args.sglang_api_key, "admin_api_key": args.sglang_admin_api_key}
    return {name: str(value) for name, value in fields.items() if value}


def has_no_key(args: Args) -> bool:
    """Return True if the engines cannot have a key."""
    return (args.sglang_tokenizer_worker_num or 1) > 1


def forwarded_fields(args: Args, records: Sequence[Record]) -> dict[str, Any]:
    """Return the SGLang fields whose ``sglang_<name>`` attribute differs from SGLang's default."""
    fields = {}
    for record in records:
        name = record["dest"]
        attribute = f"sglang_{name}"
        if name not in NOT_FORWARDED and hasattr(args, attribute) and getattr(args, attribute) != record["default"]:
            fields[name] = getattr(args, attribute)
    return fields


def _owned_fields(args: Args, spec: EngineSpec) -> dict[str, Any]:
    """The fields that slime decides for every engine."""
    pp_size = int((spec.overrides or {}).get("pp_size") or args.sglang_pp_size or 1)
    if spec.num_gpus % pp_size:
        raise ValueError(
            f"An engine of {spec.num_gpus} GPUs (--rollout-num-gpus-per-engine) cannot have {pp_size} pipeline stages "
            "(--sglang-pp-size): the second must divide the first."
        )
    on_cuda = args.device_type != "cpu"
    offload = bool(args.offload_rollout if spec.offload is None else spec.offload)
    fields: dict[str, Any] = {
        "model_path": spec.model_path,
        "trust_remote_code": bool(args.trust_remote_code),
        "random_seed": (args.seed or 0) + spec.rank * args.num_gpus_per_node,
        "host": spec.host,
        "port": spec.port,
        "nccl_port": spec.nccl_port,
        "nnodes": spec.nnodes,
        "node_rank": spec.node_rank,
        "base_gpu_id": spec.base_gpu_id,
        "gpu_id_step": 1,
        "tp_size": spec.num_gpus // pp_size,
        "pp_size": pp_size,
        "skip_server_warmup": True,
        "enable_memory_saver": on_cuda and offload,
        "enable_metrics": on_cuda or bool(args.sglang_enable_metrics),
    }
    if spec.dist_init_addr:
        fields["dist_init_addr"] = spec.dist_init_addr
    if on_cuda and offload and not spec.update_weights:
        fields["enable_weights_cpu_backup"] = True  # they are not sent again
    if args.use_rollout_routing_replay and spec.update_weights:
        fields["enable_return_routed_experts"] = True
    if args.fp16:
        fields["dtype"] = "float16"
    if takes_adapters(args) and spec.update_weights:
        fields["enable_lora"] = True
        # --sglang-lora-paths may name other adapters over the same base, of other ranks and projections.
        fields["max_lora_rank"] = max(args.lora_rank, args.sglang_max_lora_rank or 0)
        others = set(args.sglang_lora_target_modules or ())
        fields["lora_target_modules"] = ["all"] if "all" in others else sorted({*adapted_modules(args), *others})
        if not on_cuda:
            fields["lora_backend"] = "torch_native"
    return fields


def check_transport(args: Args, spec: EngineSpec) -> None:
    """Raise EngineStartError where what carries caches between the engines is not installed, or cannot be loaded."""
    backend = (spec.overrides or {}).get("disaggregation_transfer_backend", args.sglang_disaggregation_transfer_backend)
    module = {"mooncake": "mooncake", "mooncake_tcp": "mooncake", "nixl": "nixl"}.get(backend)
    if spec.worker_type not in ("prefill", "decode") or module is None:
        return
    on_cuda = args.device_type == "cuda"
    what = (
        f"--sglang-disaggregation-transfer-backend {backend} carries the caches of prefill engines, and the package "
        f"{module}"
    )
    host, other = socket.gethostname(), "nixl" if module == "mooncake" else "mooncake"
    if importlib.util.find_spec(module) is None:
        package = module if module == "nixl" else f"mooncake-transfer-engine{'' if on_cuda else '-non-cuda'}"
        raise EngineStartError(f"{what} is not installed on {host}: pip install {package}, or choose {other}")
    if module == "mooncake":  # pip does not bring what it links to, and SGLang would only name the package
        loading = [sys.executable, "-P", "-c", "import mooncake.engine"]
        try:
            done = subprocess.run(loading, capture_output=True, text=True, timeout=LOADING_DEADLINE_S)
        except subprocess.TimeoutExpired as e:
            raise EngineStartError(f"{what} was not loaded on {host} within {LOADING_DEADLINE_S:.0f} s") from e
        if done.returncode != 0:
            raise EngineStartError(
                f"{what} cannot be loaded on {host}: {done.stderr.strip().rpartition(chr(10))[2]}. It needs libraries "
                f"of the system (libibverbs1{', and those of its CUDA version' if on_cuda else ''}): install them, or "
                f"choose {other}"
            )


def _worker_fields(spec: EngineSpec) -> dict[str, Any]:
    if spec.worker_type == "prefill":
        return {
            "disaggregation_mode": "prefill",
            "load_balance_method": "follow_bootstrap_room",
            "disaggregation_bootstrap_port": spec.bootstrap_port,
        }
    if spec.worker_type == "decode":
        return {"disaggregation_mode": "decode"}
    if spec.worker_type == "encoder":
        return {"encoder_only": True}
    if spec.worker_type != "regular":
        raise ValueError(f"worker_type is one of regular, prefill, decode, encoder; got {spec.worker_type!r}")
    return {}


def flag_words(record: Record, value: Any) -> list[str]:
    """Return the words of one flag: empty when ``value`` is what leaving the flag out means.

    Args:
        record: the flag's entry in the argument list.
        value: the value its attribute shall have.
    """
    flag = max((o for o in record["options"] if not o.startswith("--no-")), key=len)
    action = record["action"]
    if action in ("true", "false"):
        return [flag] if bool(value) == (action == "true") else []
    if action == "tristate":
        if value is None:
            return []
        negative = next(o for o in record["options"] if o.startswith("--no-"))
        return [flag if value else negative]
    if value is None or value == record["default"]:
        return []
    if action == "append":
        return [word for item in value for word in (flag, _word(item, record))]
    if record["nargs"] in ("+", "*") and not isinstance(value, str):
        return [flag, *(_word(item, record) for item in value)]
    # The = form: a value may begin with a dash.
    return [f"{flag}={_word(value, record)}"]


def _word(value: object, record: Record) -> str:
    if isinstance(value, (dict, list)) or (record["kind"] == "json" and not isinstance(value, str)):
        return json.dumps(value)
    return str(value)

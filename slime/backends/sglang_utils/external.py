"""Engines that others started (``--rollout-external-engine-addrs``): what they are, and whether a run can use them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from slime.arguments.args import Args
from slime.arguments.errors import ArgumentError
from slime.arguments.rules.hf_config import read_config
from slime.arguments.rules.placement import parse_address
from slime.servers.engine_client import EngineClient
from slime.servers.http import EngineError
from slime.utils.run_state import record

logger = logging.getLogger(__name__)

OPTION = "--rollout-external-engine-addrs"
SHAPE_KEYS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size",
)  # fmt: skip
"""Keys of ``config.json`` that decide the shapes of weights."""
SECRETS = ("api_key", "admin_api_key")


class NoAnswerError(ArgumentError):
    """No server answers at the address: it may start, or restart, later."""


@dataclass(frozen=True)
class ExternalEngineInfo:
    """Answer of the engine at ``url`` about itself; ``num_gpus`` are the ranks that take part in a push of weights."""

    url: str
    host: str
    port: int
    num_gpus: int
    worker_type: str = "regular"
    tp_size: int = 1
    pp_size: int = 1
    ep_size: int = 1
    moe_dp_size: int = 1
    disaggregation_bootstrap_port: int | None = None
    disaggregation_transfer_backend: str | None = None
    page_size: int | None = None
    model_path: str = ""
    weight_version: str = "default"
    sglang_version: str = ""

    def __str__(self) -> str:
        return (
            f"{self.url} (SGLang {self.sglang_version or 'of unknown version'}, {self.model_path}, tp {self.tp_size}, "
            f"pp {self.pp_size}, weight version {self.weight_version})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, for ``args``."""
        return asdict(self)

    @property
    def is_pd_worker(self) -> bool:
        """True if it computes prompts or responses alone."""
        return self.worker_type in ("prefill", "decode")

    @property
    def parallel_config(self) -> dict[str, int]:
        """Return its parallel sizes."""
        return {"tp": self.tp_size, "pp": self.pp_size, "ep": self.ep_size, "moe_dp": self.moe_dp_size}


def normalize_external_engine_addr(addr: str) -> str:
    """Return the base URL of ``host:port`` or ``http://host:port``. Raises ValueError."""
    host, port = parse_address(addr)
    return f"http://{host}:{port}"


def discover_external_engines(args: Args) -> list[ExternalEngineInfo]:
    """Ask all engines of ``--rollout-external-engine-addrs`` what they are, and check that the run can use them.

    Raises ArgumentError with a line for every engine that does not answer or does not fit.
    """
    urls = [normalize_external_engine_addr(addr) for addr in args.rollout_external_engine_addrs or ()]
    with ThreadPoolExecutor(len(urls), thread_name_prefix="external-engine") as pool:
        futures = [pool.submit(inspect, args, url, args.sglang_api_key) for url in urls]
    if refused := [error for future in futures if isinstance(error := future.exception(), ArgumentError)]:
        raise ArgumentError("\n".join(map(str, refused)))
    infos = [future.result() for future in futures]
    _check_kinds(infos)
    for number, info in enumerate(infos):
        logger.info("external engine %d: %s", number, info)
    return infos


def _check_kinds(infos: Sequence[ExternalEngineInfo]) -> None:
    """Raise ArgumentError unless all engines are regular, or prefill and decode engines that fit each other."""
    kinds = {info.worker_type for info in infos}
    if kinds == {"regular"}:
        return
    if kinds != {"prefill", "decode"}:
        raise ArgumentError(
            f"{OPTION} names {' and '.join(sorted(kinds))} engines: prefill and decode engines need each other, and "
            "regular ones get no requests beside them"
        )
    for name in ("disaggregation_transfer_backend", "page_size"):
        found = {str(getattr(info, name)) for info in infos}
        if len(found) > 1:
            raise ArgumentError(
                f"{OPTION}: prefill and decode engines differ in {name} ({', '.join(sorted(found))}); start all of "
                "them with the same"
            )


def apply_external_engine_info_to_args(args: Args, infos: Sequence[ExternalEngineInfo]) -> None:
    """Set what of ``args`` follows from the engines: ``--rollout-num-gpus`` too, even where it was given."""
    record(
        args,
        rollout_external_engine_infos=[info.to_dict() for info in infos],
        rollout_num_engines=len(infos),
        rollout_num_gpus=sum(info.num_gpus for info in infos),
    )


def external_engine_infos_from_args(args: Args) -> list[ExternalEngineInfo]:
    """Return the engines that ``apply_external_engine_info_to_args`` has noted."""
    return [ExternalEngineInfo(**info) for info in args.rollout_external_engine_infos or ()]


def inspect(args: Args, url: str, api_key: str | None) -> ExternalEngineInfo:
    """Ask the engine at ``url`` what it is.

    Raises NoAnswerError, or ArgumentError for one that the run cannot use: of another model, or started with other
    settings than the run needs.
    """
    client = EngineClient(url, api_key=api_key)
    try:
        server, model = client.server_info(), client.model_info()
    except EngineError as e:
        if e.status is None:
            raise NoAnswerError(f"{OPTION} {url}: no engine answers there; start it first. {e}") from e
        refused = "it asks for another key than that of --sglang-api-key"
        what = refused if e.status in (401, 403) else "it does not answer as an engine of SGLang does"
        raise ArgumentError(f"{OPTION} {url}: {what}. {e}") from e
    if problem := _wrong_model(args, server, model) or _wrong_settings(args, server):
        raise ArgumentError(f"{OPTION} {url}: {problem}")
    if ignored := _ignored_flags(args, server):
        logger.warning("%s runs already, with settings of its own, not %s", url, ", ".join(ignored))
    host, port = parse_address(url)
    product = _size(server, "tp_size", "tensor_parallel_size") * _size(server, "pp_size", "pipeline_parallel_size")
    return ExternalEngineInfo(
        url=url,
        host=host,
        port=port,
        num_gpus=next((int(server[name]) for name in ("num_gpus", "num_gpus_per_engine") if server.get(name)), product),
        worker_type=_worker_type(server),
        tp_size=_size(server, "tp_size", "tensor_parallel_size"),
        pp_size=_size(server, "pp_size", "pipeline_parallel_size"),
        ep_size=_size(server, "ep_size", "expert_parallel_size"),
        moe_dp_size=_size(server, "moe_dp_size", "moe_data_parallel_size"),
        disaggregation_bootstrap_port=server.get("disaggregation_bootstrap_port"),
        disaggregation_transfer_backend=server.get("disaggregation_transfer_backend"),
        page_size=server.get("page_size"),
        model_path=str(server.get("model_path", "")),
        weight_version=str(model.get("weight_version", "default")),
        sglang_version=str(server.get("version", "")),
    )


def _size(server: Mapping[str, Any], *names: str) -> int:
    return next((int(server[name]) for name in names if server.get(name)), 1)


def _worker_type(server: Mapping[str, Any]) -> str:
    if server.get("encoder_only"):
        return "encoder"
    mode = server.get("disaggregation_mode")
    return str(mode) if mode in ("prefill", "decode") else "regular"


def _wrong_model(args: Args, server: Mapping[str, Any], model: Mapping[str, Any]) -> str | None:
    """Return why the engine does not serve the model of ``--hf-checkpoint``; what cannot be known is not compared."""
    path = str(server.get("model_path", ""))
    if os.path.realpath(path) == os.path.realpath(str(args.hf_checkpoint)):
        return None
    serves = f"it serves {path}, which is another model than --hf-checkpoint {args.hf_checkpoint}"
    own = read_config(str(args.hf_checkpoint))
    if not model.get("is_generation", True):
        return f"it serves {path}, which does not generate"
    try:
        config = read_config(path)
    except ArgumentError:  # the path is one of the engine's host: the engine says its family
        config = {key: model[key] for key in ("model_type",) if model.get(key) is not None}
    different = [
        f"{key} is {config[key]}, not {own[key]}"
        for key in ("model_type", *SHAPE_KEYS)
        if key in config and key in own and config[key] != own[key]
    ]
    return f"{serves}: {'; '.join(different)}" if different else None


def _wrong_settings(args: Args, server: Mapping[str, Any]) -> str | None:
    """Return which of the engine's own settings the run cannot work with."""
    kind, dp_size = _worker_type(server), _size(server, "dp_size", "data_parallel_size")
    if kind == "encoder":
        return "it is an encoder engine, which takes no weights and answers no prompts; name those that it works for"
    if kind != "regular" and args.use_rollout_routing_replay:
        return (
            f"--use-rollout-routing-replay needs the run's own {kind} engines: SGLang alone does not send the experts "
            "of prompts to decode engines, slime's plug-in in the run's own engines does"
        )
    if args.use_rollout_routing_replay and not server.get("enable_return_routed_experts"):
        return "--use-rollout-routing-replay needs an engine that was started with --enable-return-routed-experts"
    if args.debug_rollout_only:  # it keeps its weights
        return None
    if server.get("quantization"):
        return f"it was started with --quantization {server['quantization']}, and pushes of weights are not quantized"
    if dp_size > 1 and not server.get("enable_dp_attention") and args.update_weight_transport != "disk":
        return (
            f"its {dp_size} data-parallel copies would join the push of weights with the same ranks; start one server "
            "per copy, or give --update-weight-transport disk"
        )
    if kind != "regular" and args.weight_sync_pause_mode not in ("auto", "abort"):
        return f"{kind} engines need --weight-sync-pause-mode abort: requests on their way to another cannot be kept"
    if args.weight_sync_pause_mode == "in_place" and not server.get("disable_radix_cache"):
        return "--weight-sync-pause-mode in_place needs an engine that was started with --disable-radix-cache"
    return None


def _ignored_flags(args: Args, server: Mapping[str, Any]) -> list[str]:
    """Return the ``--sglang-*`` flags that were given and that the engine does not follow."""
    given = {name.removeprefix("sglang_"): getattr(args, name, None) for name in sorted(args.explicit_flags)
             if name.startswith("sglang_")}  # fmt: skip
    return [
        f"--sglang-{name.replace('_', '-')} {value} (it has {server[name]})"
        for name, value in given.items()
        if name in server and name not in SECRETS and server[name] != value
    ]

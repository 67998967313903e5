"""Process groups, parallel state, seeds and deterministic mode of one trainer rank."""

from __future__ import annotations

import ctypes
import logging
import os
import random
from collections.abc import Mapping, MutableMapping
from datetime import timedelta

import torch

from slime.arguments.args import Args
from slime.arguments.command_line import flags_where
from slime.backends.megatron_utils import import_megatron
from slime.utils import accelerator
from slime.utils.distributed_utils import init_gloo_group, open_store, share_gloo_device
from slime.utils.network import MEETING_FILE, join_address

logger = logging.getLogger(__name__)


# Variable -> (the value it gets when it is not set, further values with which sums are made in one order).
# NCCL chooses its algorithm by measured speed, cuBLAS splits sums over workspaces that streams compete for, and
# TransformerEngine's attention adds the gradients of keys in the order in which blocks finish.
VARIABLES: dict[str, tuple[str, tuple[str, ...]]] = {
    "NCCL_ALGO": ("Ring", ("Tree", "CollnetDirect", "CollnetChain", "^NVLS")),
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", (":16:8",)),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0", ()),
}


def enable_deterministic_mode(environment: MutableMapping[str, str] = os.environ) -> None:
    """Make torch choose deterministic kernels, and on CUDA its libraries too. Call before any of them starts.

    Raises ValueError when a variable is set to a value under which results differ from run to run; those that are not
    set are. An operation without a deterministic kernel raises RuntimeError when it is called.
    """
    if accelerator.device_type() == "cuda":
        for name, (default, others) in VARIABLES.items():
            value = environment.setdefault(name, default)
            if value not in (default, *others):
                raise ValueError(
                    f"--deterministic-mode: results depend on the run with {name}={value}; expected "
                    f"{' or '.join((default, *others))}. Set it with --train-env-vars, or leave it out"
                )
        logger.info("deterministic mode: %s", ", ".join(f"{name}={environment[name]}" for name in VARIABLES))
    torch.use_deterministic_algorithms(True)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_KEPT_BYTES, _LARGEST_BLOCK = 1 << 30, 32 << 20  # 32 MiB is the most that every glibc takes


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Let this process keep up to 1 GiB that it frees; return whether glibc does. Blocks past 32 MiB go back at once.

    What a micro-batch frees the next one wants again: given back in between, every page is a fault and is zeroed.
    ``MALLOC_TRIM_THRESHOLD_`` and ``MALLOC_MMAP_THRESHOLD_`` in the environment win.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & environment.keys():
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)) and bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_BLOCK))


__all__ = ["import_megatron", "initialize_megatron", "seed_everything"]


DEFAULT_TIMEOUT_MINUTES = 10


def initialize_megatron(args: Args) -> None:
    """Join the trainer's process group and build Megatron's parallel groups.

    Reads ``RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT`` and, for the device, ``LOCAL_RANK`` (default 0) from the
    environment. Collective over all trainer ranks. Raises ValueError when a variable is missing or the parallel sizes
    do not divide the world size, RuntimeError when called twice or when CUDA is there but not wanted.
    """
    import_megatron()
    from megatron.core import parallel_state as mpu

    if mpu.model_parallel_is_initialized():
        raise RuntimeError("initialize_megatron was called twice in this process")
    rank, world_size = _environment()
    _check_sizes(args, world_size)
    accelerator.initialize_accelerator(int(os.environ.get("LOCAL_RANK", "0")))
    if accelerator.device_type() == "cpu" and torch.cuda.is_available():
        raise RuntimeError("to train on the CPU of a machine with CUDA, hide the devices: CUDA_VISIBLE_DEVICES=''")
    if accelerator.device_type() == "cpu":
        keep_freed_memory()
    if args.deterministic_mode:
        enable_deterministic_mode()
    minutes = args.distributed_timeout_minutes or DEFAULT_TIMEOUT_MINUTES
    share_gloo_device()
    if not torch.distributed.is_initialized():
        timeout = timedelta(minutes=minutes)
        store, rank, world_size = open_store(_meeting_place(), rank, world_size, timeout)
        torch.distributed.init_process_group(
            backend=_backend(args), store=store, rank=rank, world_size=world_size, timeout=timeout
        )
    if torch.distributed.get_backend() != "gloo":
        init_gloo_group()
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=_size(args, "tensor_model_parallel_size"),
        pipeline_model_parallel_size=_size(args, "pipeline_model_parallel_size"),
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        context_parallel_size=_size(args, "context_parallel_size"),
        expert_model_parallel_size=_size(args, "expert_model_parallel_size"),
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=_size(args, "num_distributed_optimizer_instances"),
        nccl_communicator_config_path=args.nccl_communicator_config_path,
        distributed_timeout_minutes=minutes,
        order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
        create_gloo_process_groups=args.enable_gloo_process_groups,
    )
    seed_everything(args)


def seed_everything(args: Args) -> None:
    """Seed Python, numpy, torch and Megatron's trackers from ``args.seed``, differently for each pipeline stage.

    With ``--data-parallel-random-init`` data-parallel ranks differ too.
    """
    import numpy
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    seed = args.seed
    if seed is None or seed <= 0:
        raise ValueError(f"--seed must be a positive integer, got {seed}")
    seed += 100 * mpu.get_pipeline_model_parallel_rank()
    if args.data_parallel_random_init:
        seed += 10 * mpu.get_data_parallel_rank()
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(
        seed,
        te_rng_tracker=bool(args.te_rng_tracker or args.use_te_rng_tracker),
        force_reset_rng=True,
    )


def _environment() -> tuple[int, int]:
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(
            f"a trainer rank needs {', '.join(missing)} in its environment; start it through Ray or torchrun"
        )
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _meeting_place() -> str:
    if path := os.environ.get(MEETING_FILE):
        return f"file://{path}"
    return f"tcp://{join_address(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))}"


def _size(args: Args, name: str) -> int:
    return getattr(args, name, None) or 1


def _check_sizes(args: Args, world_size: int) -> None:
    layout = flags_where(lambda traits: traits.same_for_roles == "layout")
    names = [flag.dest for flag in layout if flag.kind == "int"]
    product = 1
    for name in names:
        product *= _size(args, name)
    if world_size % product:
        sizes = " x ".join(f"--{name.replace('_', '-')} {_size(args, name)}" for name in names)
        raise ValueError(f"{world_size} trainer ranks are not a multiple of {sizes} = {product}")


def _backend(args: Args) -> str:
    """Return the backend of the default group: what was asked for, or the device's own."""
    own = accelerator.communication_backend()
    wanted = args.distributed_backend or own
    if wanted == "nccl" and accelerator.device_type() == "cpu":
        return own  # the flag's default is written for CUDA
    return wanted

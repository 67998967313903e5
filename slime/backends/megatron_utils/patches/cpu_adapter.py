"""Run an unmodified megatron-core on a machine without CUDA.

:func:`install` does nothing when CUDA is available. Otherwise, before megatron is imported:

1. megatron-core (and mbridge) spell the device as a literal (``"cuda"``, ``"torch.cuda.FloatTensor"``). An import hook
   replaces exactly these constants in the code objects of the two packages while they are loaded. Nothing on disk
   changes and no other package is touched.
2. The handful of ``torch.cuda`` functions megatron calls unconditionally, all of which raise without CUDA, get the
   meaning they have on a CPU. ``torch.cuda.is_available()`` and ``device_count()`` keep telling the truth.

:func:`adapt_imported_megatron` then replaces the functions inside megatron that reach for the CUDA generator or sort
tensors by ``is_cuda``, and those that leave to a compiler or to NCCL what costs a CPU much.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import logging
import sys
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from slime.utils.autograd import Context

PACKAGES = ("megatron", "mbridge")
LITERALS = {
    "cuda": "cpu",
    "cuda:0": "cpu",
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
    "torch.cuda.DoubleTensor": "torch.DoubleTensor",
}
_CPU = torch.device("cpu")


def swap_literals(constant: object) -> Any:
    """Return ``constant`` (of a code object; nested tuples, frozensets and code included) with LITERALS replaced."""
    if isinstance(constant, str):
        return LITERALS.get(constant, constant)
    if isinstance(constant, tuple | frozenset):
        return type(constant)(swap_literals(item) for item in constant)
    if isinstance(constant, types.CodeType):
        return constant.replace(co_consts=tuple(swap_literals(item) for item in constant.co_consts))
    return constant


class _CpuLoader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> types.CodeType | None:
        return swap_literals(super().get_code(fullname))

    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        if module.__name__ == "megatron.core.jit":
            # torch.compile takes half a minute per function on a CPU, and gains nothing on such small operators.
            module.disable_jit_fuser()


class _CpuFinder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _CpuLoader(spec.loader.name, spec.loader.path)
        return spec


class CpuStream:
    """The one, always current, always idle stream of a CPU."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        del args, kwargs

    def wait_stream(self, stream: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: CpuEvent | None = None) -> Any:
        return event or CpuEvent()

    def query(self) -> bool:
        return True

    def __enter__(self) -> CpuStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CpuStream)

    def __hash__(self) -> int:
        return 0


class CpuEvent:
    """An event that has always happened already."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        del args, kwargs

    def record(self, stream: object = None) -> None: ...
    def wait(self, stream: object = None) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0


def is_installed() -> bool:
    """Return whether the adapter is active in this process."""
    return any(isinstance(finder, _CpuFinder) for finder in sys.meta_path)


def install() -> bool:
    """Install the adapter where there is no CUDA; return whether it is active.

    Raises RuntimeError when megatron or mbridge is loaded already: their device literals can no longer be replaced.
    """
    if is_installed():
        return True
    if torch.cuda.is_available():
        return False
    # Namespace packages hold no code, so ``import megatron`` alone does no harm.
    early = sorted(
        n for n, m in sys.modules.items() if n.partition(".")[0] in PACKAGES and getattr(m, "__file__", None)
    )
    if early:
        raise RuntimeError(
            f"{early[0]} (and {len(early) - 1} more modules) was imported before slime's CPU adapter, so its device is "
            "fixed to 'cuda', and there is no CUDA device here. Call "
            "slime.backends.megatron_utils.import_megatron() before the first import of megatron or mbridge."
        )
    sys.meta_path.insert(0, _CpuFinder())
    _patch_torch_cuda_for_cpu()
    return True


def _patch_torch_cuda_for_cpu() -> None:
    cuda: Any = torch.cuda
    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    stream = CpuStream()
    # Every name gets a separate function: torch._dynamo refuses one object with several meanings.
    cuda.current_device = lambda: _CPU  # megatron uses the result only as a `device=` argument
    for name in ("set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats"):
        setattr(cuda, name, _returning(None))
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(cuda, name, _returning(0))
    cuda.memory_stats = lambda device=None: {}
    cuda.Stream, cuda.Event = CpuStream, CpuEvent
    cuda.current_stream, cuda.default_stream = _returning(stream), _returning(stream)
    cuda.stream = contextlib.nullcontext
    cuda.is_current_stream_capturing = _returning(False)
    cuda.nvtx.range_push, cuda.nvtx.range_pop = _returning(None), _returning(None)
    # What megatron calls the CUDA generator is the CPU's only one.
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    cuda.get_rng_state = cuda.random.get_rng_state = _get_rng_state
    cuda.set_rng_state = cuda.random.set_rng_state = _set_rng_state
    tensor.cuda = _itself
    tensor.record_stream = lambda self, stream: None
    module.cuda = lambda self, device=None: self


def _returning(value: object) -> Callable[..., Any]:
    def stub(*args: object, **kwargs: object) -> Any:
        return value

    return stub


def _itself(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    return self


def _get_rng_state(device: object = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: object = None, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def adapt_imported_megatron() -> None:
    """Replace what the two mechanisms above cannot reach. Call after ``megatron.core`` was imported."""
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.fusions import fused_bias_swiglu
    from megatron.core.models.common.embeddings import rope_utils, rotary_pos_embedding, yarn_rotary_pos_embedding
    from megatron.core.tensor_parallel import layers, mappings
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import token_dispatcher

    # torch.cuda._lazy_call, through which megatron sets a generator's state, queues the call forever without CUDA:
    # the tracked state would silently never be set.
    megatron_random._set_cuda_rng_state = _set_rng_state
    megatron_random._get_cuda_rng_state = _get_rng_state
    # The tracker warns when the CPU generator moved inside a "GPU" region: here that is the point.
    logging.getLogger(megatron_random.__name__).addFilter(_not_about_the_cpu_generator)
    # The all-to-all dispatcher wants host lists of its split sizes and makes them from CUDA tensors only.
    token_dispatcher.maybe_move_tensor_to_cpu = _tensor_on_host
    # Ranks that divide the matrices of experts exchange unequal numbers of tokens, which gloo refuses.
    mappings._gather_along_first_dim = _gathering_unequal_parts(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _reducing_unequal_parts(mappings._reduce_scatter_along_first_dim)
    # It selects its part through an index in pinned memory, which torch has for accelerators only.
    for module in (rope_utils, rotary_pos_embedding, yarn_rotary_pos_embedding):
        module.get_pos_emb_on_this_cp_rank = _pos_emb_on_this_cp_rank
    # Written for torch.compile, they make five tensors where one will do.
    fused_bias_swiglu.swiglu, fused_bias_swiglu.swiglu_back = swiglu, swiglu_back
    name = "linear_with_grad_accumulation_and_async_allreduce"
    setattr(layers, name, multiplying_with_onednn(getattr(layers, name)))
    for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        setattr(param_and_grad_buffer, name, among_several(getattr(param_and_grad_buffer, name)))


def _not_about_the_cpu_generator(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed" not in record.getMessage()


def _tensor_on_host(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _gathering_unequal_parts(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(plain)
    def gather(
        input_: torch.Tensor,
        group: torch.distributed.ProcessGroup,
        output_split_sizes: list[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if output_split_sizes is None or len(set(output_split_sizes)) == 1:
            return plain(input_, group, output_split_sizes, use_global_buffer)
        padded = input_.new_zeros(max(output_split_sizes), *input_.shape[1:])
        padded[: len(input_)] = input_
        parts = [torch.empty_like(padded) for _ in output_split_sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])

    return gather


def _reducing_unequal_parts(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(plain)
    def reduce_scatter(
        input_: torch.Tensor,
        group: torch.distributed.ProcessGroup,
        input_split_sizes: list[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if input_split_sizes is None or len(set(input_split_sizes)) == 1:
            return plain(input_, group, input_split_sizes, use_global_buffer)
        total = input_.clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split(input_split_sizes)[group.rank()].clone()

    return reduce_scatter


def _pos_emb_on_this_cp_rank(
    pos_emb: torch.Tensor, seq_dim: int, cp_group: torch.distributed.ProcessGroup
) -> torch.Tensor:
    chunks = pos_emb.chunk(2 * cp_group.size(), dim=seq_dim)
    rank = cp_group.rank()
    return torch.cat([chunks[rank], chunks[-1 - rank]], dim=seq_dim)


# Operators in the place of megatron's own: few passes and little new memory, and faster products.


def multiplying_with_onednn(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return megatron's linear layer with the products of oneDNN where no other rank and no fused kernel takes part.

    torch leaves fp32 products to MKL, which is slower on CPUs that are not Intel's.
    """
    if not torch.backends.mkldnn.is_available():
        return plain

    @functools.wraps(plain)
    def linear(input: Tensor, weight: Tensor, bias: Tensor | None, *args: object, **options: object) -> Tensor:
        names = ("gradient_accumulation_fusion", "allreduce_dgrad", "sequence_parallel", "grad_output_buffer")
        asked = {**dict(zip(names, args, strict=False)), **options}
        plainly = not any(asked.get(name) for name in names[:3]) and asked.get("grad_output_buffer") is None
        if plainly and input.dtype == weight.dtype and weight.element_size() == 4 and input.numel():  # no float64
            return _Linear.apply(input, weight, bias)
        return plain(input, weight, bias, *args, **options)

    return linear


class _Linear(torch.autograd.Function):
    """``x @ weight.T + bias`` [..., n] of ``x`` [..., k] and ``weight`` [n, k]."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_x = _product(grad, weight.t()) if ctx.needs_input_grad[0] else None
        rows = grad.reshape(-1, grad.size(-1))
        # MKL's: oneDNN copies operands whose rows are not contiguous
        grad_weight = rows.t() @ x.reshape(-1, x.size(-1))
        return grad_x, grad_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def swiglu(y: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` [..., n] of ``y = [gate, up]`` [..., 2n]."""
    gate, up = y.chunk(2, -1)
    return F.silu(gate).mul_(up)


def swiglu_back(g: Tensor, y: Tensor) -> Tensor:
    """Return the gradient [..., 2n] of ``swiglu(y)`` for the gradient ``g`` [..., n] of its result."""
    gate, up = y.chunk(2, -1)
    grad = torch.empty_like(y)
    grad_gate, grad_up = grad.chunk(2, -1)
    torch.mul(g, F.silu(gate), out=grad_up)
    torch.ops.aten.silu_backward.grad_input(g * up, gate, grad_input=grad_gate)
    return grad


def among_several(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``collective(output, input, group=..., ...)`` (an all-gather or reduce-scatter) that skips groups of one.

    Gloo copies the tensor back and forth for a single rank; NCCL knows better.
    """

    def call(output: Tensor, input_: Tensor, **options: Any) -> Any:
        if options["group"].size() > 1:
            return collective(output, input_, **options)
        if output.data_ptr() != input_.data_ptr():
            output.copy_(input_)
        return None

    return call

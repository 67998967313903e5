from __future__ import annotations

import sys
import types

import torch

from slime.backends.megatron_utils import import_megatron
from slime.backends.megatron_utils.patches import cpu_adapter
from slime.backends.megatron_utils.patches.cpu_adapter import CpuEvent, CpuStream, swap_literals
from tests.support.marks import needs_no_cuda


def test_exactly_the_device_literals_are_replaced() -> None:
    source = """
def outer(device="cuda", other="cuda_graphs"):
    def inner():
        return "torch.cuda.FloatTensor", "cuda:0", "cuda is not available", device in {"cuda", "xpu"}
    return inner
"""
    names: dict[str, object] = {}
    exec(swap_literals(compile(source, "example", "exec")), names)
    outer = names["outer"]
    assert isinstance(outer, types.FunctionType)
    assert outer.__defaults__ == ("cpu", "cuda_graphs")
    assert outer()() == ("torch.FloatTensor", "cpu", "cuda is not available", True)
    assert outer("cuda")()[3] is False  # the set now holds "cpu"


@needs_no_cuda
def test_streams_and_events_are_idle() -> None:
    import_megatron()
    with torch.cuda.stream(torch.cuda.Stream()):
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        torch.cuda.current_stream().wait_event(event)
    assert event.query()
    assert CpuStream() == torch.cuda.current_stream()
    assert isinstance(torch.cuda.current_stream().record_event(), CpuEvent)
    torch.cuda.synchronize()


@needs_no_cuda
def test_torch_keeps_telling_the_truth_and_tensors_stay() -> None:
    import_megatron()
    assert cpu_adapter.is_installed()
    assert not torch.cuda.is_available()
    assert torch.cuda.device_count() == 0
    tensor = torch.ones(2)
    assert tensor.cuda() is tensor
    assert torch.zeros(1, device=torch.cuda.current_device()).device.type == "cpu"
    assert torch.cuda.memory_allocated() == 0


@needs_no_cuda
def test_megatrons_generator_state_is_the_cpus() -> None:
    import_megatron()
    from megatron.core.tensor_parallel import random as megatron_random

    outside = torch.get_rng_state()
    tracker = megatron_random.CudaRNGStatesTracker()
    tracker.add("test", 123)
    assert torch.equal(torch.get_rng_state(), outside)
    with tracker.fork("test"):
        seen = torch.rand(2)
    assert torch.equal(torch.get_rng_state(), outside)
    with tracker.fork("test"):
        following = torch.rand(2)
    torch.manual_seed(123)
    assert torch.equal(seen, torch.rand(2))
    assert torch.equal(following, torch.rand(2))
    torch.set_rng_state(outside)


@needs_no_cuda
def test_megatron_puts_tensors_on_the_cpu() -> None:
    import_megatron()
    from megatron.core.optimizer.grad_scaler import ConstantGradScaler
    from megatron.core.transformer.moe.token_dispatcher import maybe_move_tensor_to_cpu
    from megatron.core.transformer.utils import get_default_causal_mask

    assert ConstantGradScaler(2.0).scale.device.type == "cpu"
    assert get_default_causal_mask(3).device.type == "cpu"
    assert maybe_move_tensor_to_cpu(torch.tensor([1, 2]), as_numpy=True).tolist() == [1, 2]


@needs_no_cuda
def test_other_packages_keep_their_literals() -> None:
    finder = next(f for f in sys.meta_path if isinstance(f, cpu_adapter._CpuFinder))
    assert finder.find_spec("torch.cuda") is None
    assert finder.find_spec("megatronic") is None


def test_importing_megatron_again_is_harmless() -> None:
    import_megatron()
    stream = torch.cuda.Stream
    import_megatron()
    assert torch.cuda.Stream is stream
    assert cpu_adapter.install() is not torch.cuda.is_available()

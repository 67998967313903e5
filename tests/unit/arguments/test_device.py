from __future__ import annotations

import pytest

from slime.arguments import ArgumentError, finalize_for_device
from tests.support.arguments import parse


def finalized(device, *flags):
    args = parse(*flags)
    finalize_for_device(args, device)
    return args


def test_nothing_is_decided_while_parsing():
    args = parse()
    assert (args.bf16, args.fp16, args.distributed_backend, args.sglang_device) == (False, False, "nccl", None)
    assert not hasattr(args, "device_type")


def test_cpu():
    args = finalized("cpu")
    assert args.device_type == "cpu"
    assert (args.bf16, args.fp16, args.distributed_backend) == (False, False, "gloo")
    assert args.gradient_accumulation_fusion is args.masked_softmax_fusion is args.apply_rope_fusion is False
    assert args.persist_layer_norm is False
    assert (args.sglang_device, args.sglang_attention_backend, args.sglang_dtype) == ("cpu", "torch_native", "float32")
    assert args.sglang_disable_overlap_schedule is args.sglang_sleep_on_idle is True
    assert args.transformer_impl == "local"


@pytest.mark.parametrize(("flags", "fused"), [(("--swiglu",), True), (("--swiglu", "--no-bias-swiglu-fusion"), False)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_gate_is_fused_unless_a_flag_disables_it(device, flags, fused):
    assert finalized(device, *flags).bias_activation_fusion is fused


def test_given_engine_values_hold_on_cpu():
    args = finalized("cpu", "--sglang-dtype", "bfloat16", "--sglang-max-total-tokens", "20k")
    assert (args.sglang_dtype, args.sglang_max_total_tokens) == ("bfloat16", 20_000)


@pytest.mark.parametrize(
    "flags",
    [
        ("--bf16",),
        ("--fp16",),
        ("--attention-backend", "flash"),
        ("--transformer-impl", "transformer_engine"),
        ("--sglang-device", "cuda"),
        ("--sglang-attention-backend", "flashinfer"),
        ("--optimizer-cpu-offload",),
        ("--distributed-backend", "nccl"),
    ],
)
def test_what_needs_a_gpu_is_refused_by_name(flags):
    with pytest.raises(ArgumentError, match=" ".join(flags) + " needs a GPU"):
        finalized("cpu", *flags)


@pytest.mark.parametrize(
    ("flags", "bf16", "fp16", "reduce_in_fp32"),
    [
        ((), True, False, True),
        (("--bf16",), True, False, True),
        (("--fp16",), False, True, False),
        (("--fp32",), False, False, False),
        (("--grad-reduce-in-bf16",), True, False, False),
        (("--fp32", "--accumulate-allreduce-grads-in-fp32"), False, False, True),
    ],
)
def test_precision_on_cuda(flags, bf16, fp16, reduce_in_fp32):
    args = finalized("cuda", *flags)
    assert (args.bf16, args.fp16, args.grad_reduce_in_fp32) == (bf16, fp16, reduce_in_fp32)
    assert args.distributed_backend == "nccl"
    assert args.sglang_device is None


def test_memory_that_nccl_knows_is_not_freed():
    with pytest.raises(ArgumentError, match=r"--use-nccl-ub .*--offload-train"):
        finalized("cuda", "--use-nccl-ub", "--colocate")
    assert finalized("cuda", "--use-nccl-ub", "--colocate", "--no-offload-train").nccl_ub


def test_caches_that_stay_registered_are_not_released():
    flags = ["--prefill-num-servers", 1, "--rollout-num-gpus", 2]
    shared = [*flags, "--colocate", "--actor-num-gpus-per-node", 2]
    finalized("cuda", *shared)  # mooncake
    finalized("cuda", *shared, "--sglang-disaggregation-transfer-backend", "mooncake_tcp")
    nixl = ["--sglang-disaggregation-transfer-backend", "nixl"]
    with pytest.raises(ArgumentError, match="backend nixl: SGLang leaves the cache of prefill engine 0 registered"):
        finalized("cuda", *shared, *nixl)
    finalized("cuda", *flags, *nixl)
    finalized("cpu", *shared)


def test_variable_lengths_on_cuda():
    assert finalized("cuda").variable_seq_lengths is True


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_engines_on_the_trainers_slots_cannot_open_expandable_segments(name, monkeypatch):
    monkeypatch.setenv(name, "max_split_size_mb:64, expandable_segments: True")
    with pytest.raises(ArgumentError, match=f"{name}=.*pidfd_getfd"):
        finalized("cuda", "--colocate")
    finalized("cuda")
    finalized("cpu", "--colocate")
    finalized("cuda", "--colocate", "--update-weight-transport", "disk", "--update-weight-disk-dir", "/d")
    monkeypatch.setenv(name, "expandable_segments:False")
    finalized("cuda", "--colocate")
    with pytest.raises(ArgumentError, match=name):
        finalized("cuda", "--colocate", "--train-env-vars", f'{{"{name}": "expandable_segments:True"}}')


def test_weights_of_gpus_are_not_written_over_tcp():
    p2p = ("--update-weight-transport", "p2p")
    with pytest.raises(ArgumentError, match=r"written into host memory over TCP.*NCCL then carries them"):
        finalized("cuda", *p2p)
    finalized("cuda", *p2p, "--debug-rollout-only")
    assert finalized("cpu", *p2p).update_weight_transport == "p2p"


def test_collectives_outlast_a_weight_sync(caplog):
    assert finalized("cuda").distributed_timeout_minutes == 12  # 600 s, and 2 minutes
    assert finalized("cuda", "--weight-sync-timeout", "1210").distributed_timeout_minutes == 23
    assert finalized("cuda", "--weight-sync-timeout", "60").distributed_timeout_minutes == 10
    assert finalized("cuda", "--debug-train-only").distributed_timeout_minutes == 10
    args = finalized("cuda", "--distributed-timeout-minutes", "5")
    assert args.distributed_timeout_minutes == 5
    assert "--distributed-timeout-minutes 5: the trainers may be ended" in caplog.text

from __future__ import annotations

import shlex

import pytest

from slime.arguments.command_line import all_flags, build_parser, read_words
from slime.arguments.errors import ArgumentError
from slime.arguments.passthrough import catalog, sglang
from tests.support.arguments import dry, parse

MOE_SCRIPT = """--disable-bias-linear --qk-layernorm --group-query-attention --num-attention-heads 32
  --num-query-groups 4 --kv-channels 128 --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144
  --normalization RMSNorm --position-embedding-type rope --rotary-percent 1.0 --swiglu
  --untie-embeddings-and-output-weights --vocab-size 151936 --rotary-base 1000000 --num-experts 128
  --moe-ffn-hidden-size 768 --moe-router-topk 8 --moe-router-score-function softmax
  --moe-layer-freq [1]*48 --moe-aux-loss-coeff 0 --moe-grouped-gemm --moe-permute-fusion
  --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none seq_aux_loss --moe-router-dtype fp32
  --moe-router-pre-softmax --moe-router-enable-expert-bias --moe-router-bias-update-rate 0
  --moe-router-num-groups 4 --moe-router-group-topk 8 --moe-router-topk-scaling-factor 2.5
  --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --v-head-dim 128
  --qk-pos-emb-head-dim 64 --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0 --no-rope-fusion
  --attention-softmax-in-fp32 --accumulate-allreduce-grads-in-fp32 --attention-backend flash
  --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --sequence-parallel
  --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --decoder-last-pipeline-num-layers 6
  --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer
  --no-check-for-nan-in-loss-and-grad --rotary-interleaved --apply-layernorm-1p --norm-epsilon 1e-6
  --make-vocab-size-divisible-by 64 --use-rope-scaling --add-qkv-bias --max-position-embeddings 32768"""


def test_flags_of_launch_scripts_parse(parser):
    values, rest = read_words(parser, shlex.split(MOE_SCRIPT))
    assert rest == []
    expected = {
        "add_bias_linear": False,
        "moe_layer_freq": [1] * 48,
        "moe_aux_loss_coeff": 0.0,
        "moe_router_load_balancing_type": ["none", "seq_aux_loss"],
        "apply_rope_fusion": False,
        "attention_softmax_in_fp32": True,
        "check_for_nan_in_loss_and_grad": False,
        "num_experts": 128,
        "q_lora_rank": 1536,
        "attention_backend": "flash",
        "rotary_base": 1_000_000,
    }
    assert {name: values[name] for name in expected} == expected


def test_both_names_of_a_megatron_value_agree():
    args = parse("--norm-epsilon", "1e-6", "--accumulate-allreduce-grads-in-fp32")
    assert (args.norm_epsilon, args.layernorm_epsilon) == (1e-6, 1e-6)
    assert args.grad_reduce_in_fp32 is True
    assert args.gated_linear_unit is True
    assert args.num_moe_experts is None


def test_defaults_are_megatron_lms():
    args = parse()
    assert (args.lr_decay_style, args.min_lr, args.lr_warmup_iters) == ("linear", 0.0, 0)
    assert args.make_vocab_size_divisible_by == 128
    assert args.adam_beta1 == 0.9
    assert args.rotary_percent == 1.0
    assert args.variable_seq_lengths is True


def test_true_booleans_have_switches_that_turn_them_off(parser):
    for words in (["--no-batch-p2p-sync"], ["--disable-batch-p2p-sync"]):
        assert read_words(parser, words)[0] == {"batch_p2p_sync": False}


def test_slimes_declaration_wins_over_megatrons(flags):
    owners = {flag.dest: flag.source for flag in flags}
    for name in ("lr", "clip_grad", "seed", "load", "mtp_num_layers", "calculate_per_token_loss"):
        assert owners[name] == "slime"


def test_no_option_is_declared_twice(flags):
    options = [option for flag in flags for option in flag.options]
    assert len(options) == len(set(options))
    assert len({flag.dest for flag in flags}) == len(flags)


def test_sglang_flags_keep_their_forms():
    args = parse(
        "--sglang-context-length", "128Ki", "--sglang-cuda-graph-bs-decode", "1", "2", "--sglang-enable-metrics",
        "--sglang-preferred-sampling-params", '{"top_k": 5}', "--sglang-no-dllm-fdfo",
    )  # fmt: skip
    assert args.sglang_context_length == 131_072
    assert args.sglang_cuda_graph_bs_decode == [1, 2]
    assert args.sglang_enable_metrics is True
    assert args.sglang_preferred_sampling_params == {"top_k": 5}
    assert args.sglang_dllm_fdfo is False


@pytest.mark.parametrize(
    ("option", "way_out"),
    [
        ("--sglang-model-path", "--hf-checkpoint"),
        ("--sglang-trust-remote-code", "--trust-remote-code"),
        ("--sglang-port", "picks a free one"),
    ],
)
def test_what_slime_sets_for_engines_is_not_offered(option, way_out):
    with pytest.raises(ArgumentError, match=f"{option} is set by slime itself: .*{way_out}"):
        parse(option, "2")


def test_all_that_slime_sets_for_engines(flags):
    assert set(sglang.OWNED) == {
        "model_path", "config", "trust_remote_code", "random_seed", "enable_memory_saver", "port", "nnodes",
        "node_rank", "dist_init_addr", "gpu_id_step", "base_gpu_id", "nccl_port", "skip_server_warmup",
        "enable_return_routed_experts",
    }  # fmt: skip
    offered = {flag.field for flag in flags if flag.source == "sglang"}
    assert offered == {record["dest"] for record in catalog.records(catalog.SGLANG)} - set(sglang.OWNED)


class TestTensorParallelSizeOfEngines:
    """It follows from the slots of an engine and its pipeline stages."""

    @pytest.mark.parametrize("stages", ["--sglang-pp-size", "--sglang-pipeline-parallel-size"])
    def test_it_is_derived(self, stages):
        args = parse("--rollout-num-gpus", "8", "--rollout-num-gpus-per-engine", "8", stages, "2")
        assert (args.sglang_tp_size, args.sglang_tensor_parallel_size) == (4, 4)
        assert (args.sglang_pp_size, args.sglang_pipeline_parallel_size) == (2, 2)

    @pytest.mark.parametrize("option", ["--sglang-tp-size", "--sglang-tensor-parallel-size"])
    def test_it_may_be_said_but_not_contradicted(self, option):
        four = ("--rollout-num-gpus", "4", "--rollout-num-gpus-per-engine", "4")
        assert parse(*four, option, "4").sglang_tp_size == 4
        with pytest.raises(ArgumentError, match="--sglang-tp-size 2: an engine has --rollout-num-gpus-per-engine 4"):
            parse(*four, option, "2")


@pytest.mark.parametrize(("short", "long"), [("dp", "data_parallel_size"), ("ep", "expert_parallel_size")])
def test_long_and_short_names_of_engine_sizes_agree(short, long):
    words = ("--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", "2", "--sglang-enable-dp-attention")
    args = parse(*words, "--sglang-" + long.replace("_", "-"), "2")
    assert getattr(args, f"sglang_{short}_size") == getattr(args, f"sglang_{long}") == 2
    assert args.sglang_moe_dp_size == args.sglang_moe_data_parallel_size == 1


@pytest.mark.parametrize("mode", [["--debug-train-only"], ["--load-debug-rollout-data", "dump/{rollout_id}.pt"]])
def test_flags_of_engines_stay_valid_without_engines(mode):
    words = [
        "--sglang-mem-fraction-static",
        "0.5",
        "--sglang-cuda-graph-bs-decode",
        "1",
        "2",
        "--router-policy",
        "random",
    ]
    args = dry(*words, *mode)
    assert args.debug_train_only is True
    assert (args.sglang_mem_fraction_static, args.router_policy) == (0.5, "random")


@pytest.mark.parametrize(
    ("option", "package"), [("--sglang-xyzzy-q", "SGLang 0.5.20"), ("--router-xyzzy-q", "sglang-router 0.3.2")]
)
def test_an_unknown_flag_of_a_package_says_what_is_installed(parser, option, package):
    with pytest.raises(ArgumentError) as raised:
        read_words(parser, [option, "1"])
    assert str(raised.value).splitlines()[0] == (
        f"unknown flag {option}; {package} has no such flag; `--help xyzzy` lists the flags that mention 'xyzzy'"
    )


def test_router_defaults_are_slimes():
    args = parse()
    assert (args.router_log_level, args.router_balance_abs_threshold) == ("warn", 10)
    assert args.router_balance_rel_threshold == 1.2
    assert parse("--router-policy", "consistent_hashing").router_policy == "consistent_hashing"


def _record(*options, dest=None, default=None, kind="str", action="value", **more):
    plain = {"nargs": None, "const": None, "choices": None, "help": "", "title": "", "class": ""}
    dest = dest or options[0].lstrip("-").replace("-", "_")
    return {**plain, "options": list(options), "dest": dest, "default": default, "kind": kind, "action": action, **more}


class TestAnotherVersion:
    """An SGLang that has other flags than the pinned one."""

    RECORDS = (
        _record("--model-path", "--model"),
        _record("--tensor-parallel-size", "--tp-size", kind="int", default=1),
        _record("--data-parallel-size", "--dp-size", kind="int", default=1),
        _record("--quantum-batch", "-q", kind="int", default=3),
        _record("--sglang-style", dest="sglang_style", default="plain"),
        _record("--speculate", dest="speculation_depth", kind="int"),
    )

    @pytest.fixture
    def flags(self, monkeypatch):
        installed = catalog.records
        monkeypatch.setattr(
            catalog, "records", lambda source: list(self.RECORDS) if source is catalog.SGLANG else installed(source)
        )
        monkeypatch.setattr(catalog, "version_words", lambda source: "0.9.9")
        all_flags.cache_clear()
        yield all_flags()
        monkeypatch.undo()
        all_flags.cache_clear()

    def test_its_flags_are_offered_and_those_it_lacks_are_not(self, flags):
        parser = build_parser(flags)
        assert read_words(parser, ["--sglang-quantum-batch", "4"])[0] == {"sglang_quantum_batch": 4}
        with pytest.raises(
            ArgumentError,
            match=r"--sglang-quantum-batches; SGLang 0\.9\.9 has no such flag; did you mean --sglang-quant",
        ):
            read_words(parser, ["--sglang-quantum-batches", "4"])
        with pytest.raises(ArgumentError, match=r"--sglang-mem-fraction-static; SGLang 0\.9\.9 has no such flag"):
            read_words(parser, ["--sglang-mem-fraction-static", "0.5"])

    def test_short_options_destinations_and_the_prefix(self, flags):
        parser = build_parser(flags)
        values, _ = read_words(parser, ["--sglang-q", "4", "--sglang-speculate", "2", "--sglang-style", "loud"])
        assert values == {"sglang_quantum_batch": 4, "sglang_speculation_depth": 2, "sglang_style": "loud"}

    def test_sizes_it_calls_by_their_long_names(self, flags):
        args = parse("--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", "2", "--sglang-tp-size", "2")
        assert args.sglang_tp_size == args.sglang_tensor_parallel_size == 2
        assert args.sglang_dp_size == args.sglang_data_parallel_size == 1

    def test_sizes_it_does_not_have_are_said(self, flags, capsys):
        parse()
        assert "the installed SGLang has no --sglang-moe-dp-size" in capsys.readouterr().err

from __future__ import annotations

import json
import shlex
import sys

import pytest

from slime.arguments.command_line import read_words
from slime.arguments.errors import ArgumentError
from slime.arguments.passthrough import catalog
from tests.support.arguments import parse

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
    assert args.attention_dropout == args.hidden_dropout == 0.1
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
        ("--sglang-tp-size", "--rollout-num-gpus-per-engine"),
        ("--sglang-tensor-parallel-size", "--rollout-num-gpus-per-engine"),
        ("--sglang-model-path", "--hf-checkpoint"),
        ("--sglang-port", "picks a free one"),
    ],
)
def test_what_slime_sets_for_engines_is_not_offered(option, way_out):
    with pytest.raises(ArgumentError, match=f"{option} is set by slime itself: .*{way_out}"):
        parse(option, "2")


def test_router_defaults_are_slimes():
    args = parse()
    assert (args.router_log_level, args.router_balance_abs_threshold) == ("warn", 10)
    assert args.router_balance_rel_threshold == 1.2
    assert parse("--router-policy", "consistent_hashing").router_policy == "consistent_hashing"


class TestCatalog:
    def test_another_version_is_read_once_and_cached(self, monkeypatch, tmp_path):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(catalog, "installed_version", lambda source: "99.0")
        reads = []
        monkeypatch.setattr(catalog, "read_installed", lambda source: reads.append(source) or [{"dest": "new"}])
        assert catalog.records(catalog.SGLANG) == [{"dest": "new"}]
        assert catalog.records(catalog.SGLANG) == [{"dest": "new"}]
        assert reads == [catalog.SGLANG]
        cached = tmp_path / "slime" / "arguments" / "sglang-99.0.json"
        assert json.loads(cached.read_text()) == [{"dest": "new"}]
        assert [p.name for p in cached.parent.iterdir()] == [cached.name]

    def test_a_package_that_is_not_installed_here_has_the_pinned_flags(self, monkeypatch):
        monkeypatch.setattr(catalog, "installed_version", lambda source: None)
        assert len(catalog.records(catalog.MEGATRON)) > 250

    def test_an_unwritable_cache_is_said_and_survived(self, capsys, tmp_path):
        blocked = tmp_path / "file"
        blocked.write_text("")
        catalog.write_atomically(blocked / "list.json", "[]")
        assert "cannot cache" in capsys.readouterr().err

    def test_a_failing_reader_says_why(self, monkeypatch, tmp_path):
        (tmp_path / "readers").mkdir()
        (tmp_path / "readers" / "broken.py").write_text("raise SystemExit('no such thing')")
        monkeypatch.setattr(catalog, "HERE", tmp_path)
        with pytest.raises(
            ArgumentError, match=r"cannot read the arguments of the installed thing .*\n.*no such thing"
        ):
            catalog.read_installed(catalog.Source("thing", "1.0", "broken.py"))

    def test_stand_ins_are_seen_by_sglangs_reader_only(self, monkeypatch, tmp_path):
        (tmp_path / "readers").mkdir()
        script = "import os, sys; open(sys.argv[1], 'w').write('[\"' + os.environ.get('PYTHONPATH', '') + '\"]')"
        (tmp_path / "readers" / catalog.SGLANG.reader).write_text(script)
        (tmp_path / "readers" / catalog.MEGATRON.reader).write_text(script)
        monkeypatch.setattr(catalog, "HERE", tmp_path)
        monkeypatch.setattr(catalog, "has_cuda_device", lambda: False)
        monkeypatch.delenv("PYTHONPATH", raising=False)
        assert catalog.read_installed(catalog.SGLANG) == [str(catalog.STAND_INS)]
        assert catalog.read_installed(catalog.MEGATRON) == [""]
        assert str(catalog.STAND_INS) not in sys.path

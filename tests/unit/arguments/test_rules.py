"""Derivations: what the namespace holds after the checks."""

from __future__ import annotations

import pytest

from slime.arguments import ArgumentError, parse_args
from tests.support.arguments import minimal_flags, parse


def without(*options, extra=()):
    """The minimal command line without ``options`` (each with one value)."""
    words = minimal_flags()
    for option in options:
        place = words.index(option)
        del words[place : place + 2]
    return parse_args([*words, *map(str, extra)])


class TestPlacement:
    def test_disaggregated_runs_do_not_offload(self):
        args = parse("--rollout-num-gpus", 4, "--rollout-num-gpus-per-engine", 2)
        assert (args.offload_train, args.offload_rollout, args.rollout_num_engines) == (False, False, 2)
        assert not hasattr(args, "offload")

    def test_colocation_implies_offload_and_shares_the_slots(self):
        args = without("--rollout-num-gpus", extra=["--colocate", "--actor-num-gpus-per-node", 4])
        assert (args.offload_train, args.offload_rollout, args.rollout_num_gpus) == (True, True, 4)
        assert args.disable_grad_buffers_cpu_backup is args.disable_param_buffers_cpu_backup is True

    def test_an_explicit_no_offload_holds_with_colocation(self):
        args = parse("--colocate", "--no-offload-train")
        assert (args.offload_train, args.offload_rollout) == (False, True)

    def test_offload_is_shorthand_for_both(self):
        args = parse("--offload")
        assert (args.offload_train, args.offload_rollout) == (True, True)

    @pytest.mark.parametrize(("slots", "nodes", "per_node"), [(4, 1, 4), (8, 1, 8), (16, 2, 8), (0, 0, 0)])
    def test_rollout_only_gives_all_slots_to_engines(self, slots, nodes, per_node):
        args = parse("--debug-rollout-only", "--colocate", "--rollout-num-gpus", slots)
        assert (args.actor_num_nodes, args.actor_num_gpus_per_node) == (nodes, per_node)
        assert (args.colocate, args.offload_train, args.offload_rollout) == (False, False, False)

    def test_rollout_only_takes_the_actor_slots_of_a_colocated_command_line(self):
        extra = ["--debug-rollout-only", "--colocate", "--actor-num-gpus-per-node", 4]
        assert without("--rollout-num-gpus", extra=extra).rollout_num_gpus == 4

    def test_train_only_needs_no_engine_slots(self):
        assert without("--rollout-num-gpus", extra=["--debug-train-only"]).rollout_num_gpus is None

    def test_no_critic_yet(self):
        args = parse()
        assert args.use_critic is False
        assert (args.critic_num_nodes, args.critic_num_gpus_per_node) == (1, 1)
        assert args.rollout_external is False


class TestBatches:
    def test_steps_give_the_batch_size(self):
        args = without("--global-batch-size", extra=["--n-samples-per-prompt", 8, "--num-steps-per-rollout", 2])
        assert args.global_batch_size * args.num_steps_per_rollout == args.rollout_batch_size * 8

    def test_both_may_be_given_when_they_agree(self):
        extra = ["--n-samples-per-prompt", 8, "--num-steps-per-rollout", 2, "--global-batch-size", 16]
        assert parse(*extra).global_batch_size == 16

    def test_fan_out_may_make_more_samples_than_prompts_times_n(self):
        args = parse("--global-batch-size", 64, "--custom-generate-function-path", "my.generate")
        assert args.global_batch_size == 64

    def test_rollout_only_needs_no_batch_size(self):
        assert without("--global-batch-size", extra=["--debug-rollout-only"]).global_batch_size is None

    def test_token_limit_of_the_log_prob_pass_falls_back(self):
        args = parse("--use-dynamic-batch-size", "--max-tokens-per-gpu", 512, "--balance-by-flops")
        assert args.log_probs_max_tokens_per_gpu == 512
        assert args.balance_data is True

    def test_a_step_needs_a_sample_per_rank(self):
        with pytest.raises(ArgumentError, match="--global-batch-size 4 leaves some of 8 data-parallel ranks"):
            parse("--actor-num-gpus-per-node", 8, "--use-dynamic-batch-size", "--max-tokens-per-gpu", 512)

    def test_dynamic_batches_need_not_divide(self):
        words = ["--rollout-batch-size", 6, "--global-batch-size", 6, "--actor-num-gpus-per-node", 4]
        assert parse(*words, "--use-dynamic-batch-size", "--max-tokens-per-gpu", 512).data_parallel_size == 4


class TestRollout:
    def test_defaults_follow_each_other(self):
        args = parse("--rollout-max-context-len", 100, "--reward-key", "score")
        assert args.over_sampling_batch_size == args.rollout_batch_size
        assert args.rollout_max_prompt_len == 99
        assert args.eval_max_context_len == 100
        assert args.eval_reward_key == "score"
        assert args.eval_function_path == args.rollout_function_path

    def test_rollouts_and_epochs_may_both_be_given(self):
        args = parse("--num-rollout", 10, "--num-epoch", 2)
        assert (args.num_rollout, args.num_epoch) == (10, 2)

    def test_epochs_need_prompts(self):
        words = ["--num-epoch", 1, "--disable-rollout-global-dataset"]
        with pytest.raises(ArgumentError, match="--num-epoch counts passes"):
            without("--num-rollout", extra=words)
        assert parse(*words).num_rollout == 1

    def test_slices_of_prompt_files(self):
        assert parse("--prompt-data", "data.parquet@[-10:]").prompt_data == "data.parquet@[-10:]"

    def test_no_prompts_are_needed_to_replay_or_to_evaluate_once(self):
        without("--prompt-data", extra=["--load-debug-rollout-data", "x_{rollout_id}.pt"])
        words = ["--num-rollout", 0, "--eval-interval", 1, "--eval-prompt-data", "a", "b.jsonl"]
        assert without("--prompt-data", extra=words).num_rollout == 0


class TestAlgorithm:
    def test_clips(self):
        assert parse("--eps-clip", 0.3).eps_clip_high == 0.3
        assert parse("--eps-clip", 0.2, "--eps-clip-high", 0.28).eps_clip_high == 0.28

    def test_groups_of_one_have_no_deviation(self):
        assert parse().grpo_std_normalization is False
        assert parse("--n-samples-per-prompt", 2).grpo_std_normalization is True

    @pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo"])
    def test_estimators(self, estimator):
        assert parse("--advantage-estimator", estimator).advantage_estimator == estimator

    def test_zero_kl_loss_as_in_the_launch_scripts(self):
        assert parse("--use-kl-loss", "--kl-loss-coef", "0.00", "--kl-loss-type", "low_var_kl").use_kl_loss is True


class TestDebug:
    def test_dump_details_sets_both_paths(self):
        args = parse("--dump-details", "/d")
        assert args.save_debug_rollout_data == "/d/rollout_data/{rollout_id}.pt"
        assert args.save_debug_train_data == "/d/train_data/{rollout_id}.pt"

    def test_replay_starts_no_engines(self):
        assert parse("--load-debug-rollout-data", "/d/{rollout_id}.pt").debug_train_only is True


class TestCheckpoints:
    def tracker(self, directory):
        (directory / "latest_checkpointed_iteration.txt").write_text("3")
        return str(directory)

    def test_without_load_weights_come_from_the_reference_which_is_the_hf_checkpoint(self):
        args = parse()
        assert args.load == args.ref_load == args.hf_checkpoint
        assert args.no_load_optim is args.no_load_rng is args.finetune is True
        assert args.start_rollout_id == 0

    def test_a_megatron_checkpoint_is_continued(self, tmp_path):
        args = parse("--load", self.tracker(tmp_path))
        assert args.load == str(tmp_path)
        assert args.finetune is False
        assert args.start_rollout_id is None

    def test_the_first_start_of_a_command_line_that_resumes(self, tmp_path):
        directory = str(tmp_path / "not_yet")
        args = parse("--load", directory, "--save", directory, "--save-interval", 1)
        assert args.load == args.hf_checkpoint
        assert args.save == directory

    def test_an_hf_directory_is_loaded_as_it_is(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        args = parse("--load", tmp_path)
        assert args.load == str(tmp_path)
        assert args.finetune is True

    def test_the_reference_checkpoints_step_is_taken_over(self, tmp_path):
        args = parse("--ref-load", self.tracker(tmp_path), "--ref-ckpt-step", 7)
        assert (args.load, args.ckpt_step) == (str(tmp_path), 7)

    def test_an_explicit_start_holds(self):
        assert parse("--start-rollout-id", 5).start_rollout_id == 5

    def test_first_weights_must_exist(self):
        with pytest.raises(ArgumentError, match="--ref-load /no/such is no directory, and the first weights"):
            parse("--ref-load", "/no/such")


class TestMegatron:
    def test_sizes(self):
        words = ["--actor-num-nodes", 2, "--actor-num-gpus-per-node", 4, "--tensor-model-parallel-size", 2]
        args = parse(*words, "--context-parallel-size", 2, "--sequence-parallel")
        assert (args.world_size, args.data_parallel_size, args.rank) == (8, 2, 0)
        assert args.sequence_parallel is True

    def test_sequence_parallel_needs_tensor_parallel(self):
        assert parse("--sequence-parallel").sequence_parallel is False

    @pytest.mark.parametrize(("vocabulary", "tp", "padded"), [(384, 1, 384), (384, 2, 512)])
    def test_padded_vocabulary(self, vocabulary, tp, padded):
        args = parse("--tensor-model-parallel-size", tp, "--actor-num-gpus-per-node", tp)
        assert args.padded_vocab_size == padded

    def test_forced_values(self):
        args = parse()
        assert args.use_distributed_optimizer is True
        assert args.position_embedding_type == "rope"
        assert args.tokenizer_model == args.hf_checkpoint
        assert args.moe_token_dispatcher_type == "alltoall"
        assert args.dist_ckpt_save_pre_mcore_014 is args.ckpt_fully_parallel_load is True

    def test_virtual_stages(self):
        words = ["--pipeline-model-parallel-size", 2, "--actor-num-gpus-per-node", 2]
        assert parse(*words).virtual_pipeline_model_parallel_size is None
        assert parse(*words).batch_p2p_comm is True
        with pytest.raises(ArgumentError, match="1 layers per pipeline stage are no multiple of"):
            parse(*words, "--num-layers-per-virtual-pipeline-stage", 2)

    def test_uneven_stages_must_be_asked_for(self):
        words = ["--pipeline-model-parallel-size", 3, "--actor-num-gpus-per-node", 3, "--rollout-batch-size", 6]
        with pytest.raises(
            ArgumentError, match="--num-layers 2 cannot be divided among --pipeline-model-parallel-size 3"
        ):
            parse(*words, "--global-batch-size", 6)

    def test_model_sizes_are_derived(self):
        words = minimal_flags()
        place = words.index("--kv-channels")
        del words[place : place + 2]
        assert parse_args(words).kv_channels == 64 // 4

    def test_recompute_activations_is_selective(self):
        assert parse("--recompute-activations").recompute_granularity == "selective"


class TestSglang:
    def test_tensor_size_is_slots_over_stages(self):
        words = ["--rollout-num-gpus", 8, "--rollout-num-gpus-per-engine", 4, "--sglang-pp-size", 2]
        args = parse(*words)
        assert (args.sglang_tp_size, args.sglang_pp_size, args.sglang_pipeline_parallel_size) == (2, 2, 2)

    def test_long_names_are_aliases(self):
        words = ["--rollout-num-gpus", 4, "--rollout-num-gpus-per-engine", 4]
        args = parse(*words, "--sglang-expert-parallel-size", 4)
        assert (args.sglang_ep_size, args.sglang_expert_parallel_size) == (4, 4)

    def test_an_ipv6_router_gets_brackets(self):
        args = parse("--sglang-router-ip", "fe80::1", "--sglang-router-port", 3000)
        assert args.sglang_router_ip == "[fe80::1]"


def test_slime_validate_args_is_the_public_name_of_the_rules():
    from slime.arguments.rules import apply_rules
    from slime.utils import arguments

    assert arguments.slime_validate_args is apply_rules
    assert arguments.parse_args is parse_args

"""Qwen3-30B-A3B on several nodes, from a converted checkpoint."""

from dataclasses import dataclass

import slime.utils.external_utils.command_utils as U


@dataclass
class ScriptArgs(U.ExecuteTrainConfig):
    model_name: str = "Qwen3-30B-A3B"
    megatron_model_type: str = "qwen3-30B-A3B"
    num_gpus_per_node: int = 8
    run_id: str = "test"
    rollout_fp8: bool = False


def prepare(args: ScriptArgs):
    U.exec_command("mkdir -p /data/models /data/datasets")
    U.exec_command(f"hf download Qwen/{args.model_name} --local-dir /data/models/{args.model_name}")
    U.hf_download_dataset("zhuzilin/dapo-math-17k")
    U.convert_checkpoint(
        model_name=args.model_name,
        megatron_model_type=args.megatron_model_type,
        num_gpus_per_node=args.num_gpus_per_node,
        dir_dst="/data/models",
    )


def execute(args: ScriptArgs):
    load_save_path = f"/data/shared_data/{args.run_id}/checkpoints"
    ckpt_args = (
        f"--hf-checkpoint /data/models/{args.model_name} "
        f"--ref-load /data/models/{args.model_name}_torch_dist "
        f"--load {load_save_path} --save {load_save_path} --save-interval 20 "
    )
    rollout_args = (
        "--prompt-data /data/datasets/dapo-math-17k/dapo-math-17k.jsonl --input-key prompt --label-key label "
        "--apply-chat-template --rollout-shuffle --rm-type deepscaler --num-rollout 3000 --rollout-batch-size 32 "
        "--n-samples-per-prompt 8 --rollout-max-response-len 8192 --rollout-temperature 1 --global-batch-size 256 "
        "--balance-data "
    )
    perf_args = (
        "--tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 1 "
        "--context-parallel-size 1 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
        "--use-dynamic-batch-size --max-tokens-per-gpu 32768 "
        "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer "
    )
    grpo_args = "--advantage-estimator gspo --eps-clip 4e-4 --entropy-coef 0.00 --use-tis "
    optimizer_args = "--optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 "
    sglang_args = (
        "--rollout-num-gpus-per-engine 8 --sglang-mem-fraction-static 0.7 --sglang-ep-size 8 "
        "--sglang-enable-deepep-moe --sglang-cuda-graph-max-bs 512 "
    )
    misc_args = (
        "--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 "
        "--attention-softmax-in-fp32 --attention-backend flash "
        f"--actor-num-nodes {args.num_nodes} --actor-num-gpus-per-node {args.num_gpus_per_node} --colocate "
        "--moe-token-dispatcher-type flex --moe-enable-deepep --use-fault-tolerance "
        f"--dump-details /data/shared_data/{args.run_id}/dump_details "
    )
    U.execute_train(
        train_args=f"{ckpt_args}{rollout_args}{optimizer_args}{grpo_args}{perf_args}{sglang_args}{misc_args}"
        f"{U.get_default_wandb_args(__file__, run_id=args.run_id)}",
        config=args,
        num_gpus_per_node=args.num_gpus_per_node,
        megatron_model_type=args.megatron_model_type,
        extra_env_vars={"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1"},
        megatron_path="/data/Megatron-LM",
    )


if __name__ == "__main__":
    script_args = ScriptArgs()
    prepare(script_args)
    execute(script_args)

"""Qwen3-4B-Base, supervised fine-tuning, with a file of flags that the launcher writes."""

import slime.utils.external_utils.command_utils as U

CONFIG = """
log_passrate: true
sglang_cuda_graph_max_bs: 32
"""


def execute():
    train_args = (
        "--hf-checkpoint /data/models/Qwen3-4B-Base --ref-load /data/models/Qwen3-4B-Base "
        "--rollout-function-path slime.rollout.sft_rollout.generate_rollout "
        "--prompt-data /data/datasets/openhermes.json --input-key messages --rollout-shuffle --num-epoch 3 "
        "--rollout-batch-size 128 --global-batch-size 128 --loss-type sft_loss --calculate-per-token-loss "
        "--disable-compute-advantages-and-returns --debug-train-only "
        "--tensor-model-parallel-size 1 --use-dynamic-batch-size --max-tokens-per-gpu 9216 "
        "--optimizer adam --lr 1e-5 --attention-dropout 0.0 --hidden-dropout 0.0 --attention-backend flash "
        "--actor-num-nodes 1 --actor-num-gpus-per-node 8 --train-memory-margin-bytes 1073741824 "
        f"--custom-config-path {U.save_to_temp_file(CONFIG, 'yaml')} "
    )
    U.execute_train(
        train_args=train_args, num_gpus_per_node=8, megatron_model_type="qwen3-4B", train_script="train_async.py"
    )


if __name__ == "__main__":
    U.exec_command("hf download Qwen/Qwen3-4B-Base --local-dir /data/models/Qwen3-4B-Base")
    U.fp8_cast_bf16("/data/models/Qwen3-4B-FP8", "/data/models/Qwen3-4B-bf16")
    execute()

#!/bin/bash
# Qwen3-4B with a Python tool, over several turns, with rewards and losses of one's own.

# for a second run on the same machine
pkill -9 sglang
sleep 3
ray stop --force
pkill -9 ray
pkill -9 python

set -ex

# output of Python at once
export PYTHONUNBUFFERED=1

NVLINK_COUNT=$(nvidia-smi topo -m 2>/dev/null | grep -o 'NV[0-9][0-9]*' | wc -l)
if [ "$NVLINK_COUNT" -gt 0 ]; then
   HAS_NVLINK=1
else
   HAS_NVLINK=0
fi

SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/qwen3-4B.sh"

CKPT_ARGS=(
   --hf-checkpoint /data/Qwen3-4B
   --ref-load /data/Qwen3-4B_torch_dist
   --load /data/Qwen3-4B_slime/
   --save /data/Qwen3-4B_slime/
   --save-interval 20
)

ROLLOUT_ARGS=(
   --prompt-data /data/dapo-math-17k/dapo-math-17k.jsonl
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --reward-key score
   --eval-reward-key score
   --group-rm
   --num-rollout 3000
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --rollout-temperature 1
   --global-batch-size 256
)

CUSTOM_ARGS=(
   --custom-generate-function-path my_project.generate.generate
   --custom-rm-path my_project.rewards.reward
   --custom-reward-post-process-path my_project.rewards.post_process
   --custom-convert-samples-to-train-data-path my_project.data.convert
   --custom-rollout-log-function-path my_project.logs.train
   --custom-eval-rollout-log-function-path my_project.logs.evaluation
   --custom-advantage-function-path my_project.loss.advantages
   --custom-tis-function-path my_project.loss.weights
   --custom-pg-loss-reducer-function-path my_project.loss.reducer
   --custom-megatron-init-path my_project.megatron.init
   --custom-megatron-before-log-prob-hook-path my_project.megatron.before_log_prob
   --custom-megatron-before-train-step-hook-path my_project.megatron.before_step
   --custom-update-weight-post-write-path my_project.megatron.written
   --custom-config-path ${SCRIPT_DIR}/mis.yaml
   --get-mismatch-metrics
)

PERF_ARGS=(
   --tensor-model-parallel-size 2
   --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --expert-model-parallel-size 1
   --expert-tensor-parallel-size 1

   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1

   # --micro-batch-size 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 9216
)

GRPO_ARGS=(
   --advantage-estimator grpo
   --use-kl-loss
   --kl-loss-coef 0.00
   --kl-loss-type low_var_kl
   --entropy-coef 0.00
   --eps-clip 0.2
   --eps-clip-high 0.28
   --use-rollout-logprobs
)

OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 1e-6
   --lr-decay-style constant
   --weight-decay 0.1
   --adam-beta1 0.9
   --adam-beta2 0.98
)

SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 2
   --sglang-mem-fraction-static 0.7
   --sglang-tool-call-parser qwen25
   --sglang-reasoning-parser qwen3
)

MISC_ARGS=(
   # the default dropout of Megatron is 0.1
   --attention-dropout 0.0
   --hidden-dropout 0.0
   --accumulate-allreduce-grads-in-fp32
   --attention-softmax-in-fp32
   --attention-backend flash
   --update-weight-transport disk
   --update-weight-disk-dir /shared/weights
   --update-weight-disk-keep-files
   --train-env-vars '{"NCCL_DEBUG":"WARN"}'
   --check-weight-update-equal
   --no-offload-train
   --no-offload-rollout
)

export MASTER_ADDR=${MASTER_ADDR:-"127.0.0.1"}
ray start --head --node-ip-address ${MASTER_ADDR} --num-gpus 8 --disable-usage-stats --dashboard-host=0.0.0.0 --dashboard-port=8265

RUNTIME_ENV_JSON="{
  \"env_vars\": {
    \"PYTHONPATH\": \"/data/Megatron-LM/\",
    \"CUDA_DEVICE_MAX_CONNECTIONS\": \"1\",
    \"NCCL_NVLS_ENABLE\": \"${HAS_NVLINK}\"
  }
}"

ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json="${RUNTIME_ENV_JSON}" \
   -- python3 train.py \
   --actor-num-nodes 1 \
   --actor-num-gpus-per-node 8 \
   --colocate \
   ${MODEL_ARGS[@]} \
   ${CKPT_ARGS[@]} \
   ${ROLLOUT_ARGS[@]} \
   ${CUSTOM_ARGS[@]} \
   ${PERF_ARGS[@]} \
   ${GRPO_ARGS[@]} \
   ${OPTIMIZER_ARGS[@]} \
   ${SGLANG_ARGS[@]} \
   ${MISC_ARGS[@]}

#!/bin/bash
# GLM-Z1-9B, engines on GPUs of their own, the next rollout generated while the last one is trained on.

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
source "${SCRIPT_DIR}/models/glm4-9B.sh"

CKPT_ARGS=(
   --hf-checkpoint /data/GLM-Z1-9B-0414
   --ref-load /data/GLM-Z1-9B-0414_torch_dist
   --load /data/GLM-Z1-9B-0414_slime/
   --save /data/GLM-Z1-9B-0414_slime/
   --save-interval 20
   --save-hf /data/GLM-Z1-9B-0414_hf/{rollout_id}
   --async-save
   --no-save-optim
   --ref-ckpt-step 100
   --start-rollout-id 0
)

ROLLOUT_ARGS=(
   --prompt-data /data/dapo-math-17k/dapo-math-17k.jsonl
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --rm-type deepscaler
   --num-rollout 3000
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --rollout-temperature 1
   --global-batch-size 256
   --rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async
   --partial-rollout
   --mask-offpolicy-in-partial-rollout
   --buffer-filter-path slime.rollout.data_source.pop_first
   --data-source-path slime.rollout.data_source.RolloutDataSourceWithBuffer
   --rollout-sample-filter-path my_project.filters.mark
   --rollout-all-samples-process-path my_project.filters.look
   --rollout-data-postprocess-path my_project.data.postprocess
   --rollout-sample-hook-path my_project.hooks.one
   --rollout-sample-hook-path my_project.hooks.two
   --rollout-seed 42
   --rollout-top-k -1
   --rollout-max-prompt-len 2048
   --rollout-max-context-len 16384
   --rollout-stop '</answer>' '<|user|>'
   --rollout-stop-token-ids 151336 151338
   --rollout-skip-special-tokens
   --apply-chat-template-kwargs '{"enable_thinking":false}'
   --metadata-key metadata
   --tool-key tools
   --rollout-data-transport object-store
)

EVAL_ARGS=(
   --eval-interval 20
   --eval-prompt-data aime /data/aime-2024/aime-2024.jsonl gpqa /data/gpqa/gpqa.jsonl
   --eval-function-path slime.rollout.sglang_rollout.generate_rollout
   --eval-input-key prompt
   --eval-label-key label
   --eval-tool-key tools
   --eval-temperature 0.6
   --eval-top-k 20
   --eval-max-prompt-len 4096
   --eval-max-context-len 32768
   --eval-min-new-tokens 4
)

PERF_ARGS=(
   --tensor-model-parallel-size 2
   --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 2
   --expert-model-parallel-size 1
   --expert-tensor-parallel-size 1

   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1

   # --micro-batch-size 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 4608
   --log-probs-max-tokens-per-gpu 4608
   --log-probs-chunk-size 1024
   --recompute-loss-function
)

GRPO_ARGS=(
   --advantage-estimator grpo
   --use-kl-loss
   --kl-loss-coef 0.00
   --kl-loss-type low_var_kl
   --entropy-coef 0.00
   --eps-clip 0.2
   --eps-clip-high 0.28
   --eps-clip-c 3.0
   --use-unbiased-kl
   --ref-update-interval 100
   --use-rollout-entropy
   --keep-old-actor
)

OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 1e-6
   --lr-decay-style constant
   --weight-decay 0.1
   --adam-beta1 0.9
   --adam-beta2 0.98
   --clip-grad 1.0
   --reset-optimizer-states
)

SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 2
   --router-policy consistent_hashing
   --router-balance-abs-threshold 10
   --sglang-router-port 30000
   --sglang-router-request-timeout-secs 3600
   --sglang-pipeline-parallel-size 1
   --sglang-tp 2
)

FAULT_ARGS=(
   --use-fault-tolerance
   --rollout-health-check-interval 10
   --rollout-health-check-timeout 5
   --rollout-health-check-first-wait 300
   --update-weights-interval 2
   --distributed-backend nccl
   --distributed-timeout-minutes 30
)

MISC_ARGS=(
   # the default dropout of Megatron is 0.1
   --attention-dropout 0.0
   --hidden-dropout 0.0
   --accumulate-allreduce-grads-in-fp32
   --attention-softmax-in-fp32
   --attention-backend flash
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
   -- python3 train_async.py \
   --actor-num-nodes 1 \
   --actor-num-gpus-per-node 4 \
   --rollout-num-gpus 4 \
   ${MODEL_ARGS[@]} \
   ${CKPT_ARGS[@]} \
   ${ROLLOUT_ARGS[@]} \
   ${EVAL_ARGS[@]} \
   ${PERF_ARGS[@]} \
   ${GRPO_ARGS[@]} \
   ${OPTIMIZER_ARGS[@]} \
   ${SGLANG_ARGS[@]} \
   ${FAULT_ARGS[@]} \
   ${MISC_ARGS[@]}

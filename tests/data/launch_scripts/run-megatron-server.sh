#!/bin/bash
# A teacher's log-probs from a Megatron server.

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
   --load /data/Qwen3-4B_torch_dist
)

ROLLOUT_ARGS=(
   --rollout-batch-size 8
   --global-batch-size 8
   --num-rollout 1
   --debug-train-only
   --disable-rollout-global-dataset
   --micro-batch-size 1
)

SERVER_ARGS=(
   --teacher-port 7999
   --teacher-warmup-port 7999
   --teacher-warmup-timeout-s 3000
   --teacher-sample-reduction-chunk-size 4096
   --teacher-label-reduction-chunk-size 4096
   --megatron-server-max-length 0
   --megatron-server-update-timeout-s 3600
   --megatron-server-warmup
)

PERF_ARGS=(
   --tensor-model-parallel-size 2
   --sequence-parallel
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
   -- python3 slime/backends/megatron_utils/server/megatron_server.py \
   --actor-num-nodes 1 \
   --actor-num-gpus-per-node 8 \
   ${MODEL_ARGS[@]} \
   ${CKPT_ARGS[@]} \
   ${ROLLOUT_ARGS[@]} \
   ${SERVER_ARGS[@]} \
   ${PERF_ARGS[@]} \
   ${MISC_ARGS[@]}

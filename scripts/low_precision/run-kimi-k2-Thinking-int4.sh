#!/usr/bin/env bash
# run-kimi-k2-Thinking.sh, whose engines have INT4 experts, with training that knows of the rounding.
set -euo pipefail
INT4_GROUP_SIZE=${INT4_GROUP_SIZE:-32} # that of the published checkpoint
source "$(dirname -- "${BASH_SOURCE[0]}")/../lib/recipe.sh"

CKPT_ARGS=(
    --load "$BASE_DIR/Kimi-K2-Thinking-INT4_slime"
    --save "$BASE_DIR/Kimi-K2-Thinking-INT4_slime"
)

exec "$SCRIPTS/run-kimi-k2-Thinking.sh" "${CKPT_ARGS[@]}" "${INT4_QAT_ARGS[@]}" "$@"

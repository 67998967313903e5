#!/usr/bin/env bash
# The recipe of Qwen3-4B with importance weights where engine and trainer disagree.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
exec "$here/../../scripts/run-qwen3-4B.sh" --use-tis \
    --custom-tis-function-path examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp \
    --custom-config-path "$here/mis.yaml" "$@"

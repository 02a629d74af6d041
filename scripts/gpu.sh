#!/usr/bin/env bash
# All that wants a GPU in one go: the model writes data, adapters for several exit layers are trained
# from one frozen pass, and each is evaluated and timed. Run again, it goes on where it was stopped.
#
#   scripts/gpu.sh                                   # SmolLM2-135M into outputs/gpu/smollm2-135m
#   MODEL=llama-3.2-1b EXITS=2,3 scripts/gpu.sh
#
# TRAIN, EVALUATE and SPEED take further overrides for the three commands.
set -euo pipefail
cd "$(dirname "$0")/.."

MODEL=${MODEL:-smollm2-135m}
EXITS=${EXITS:-2,3,4,6}
OUT=${OUT:-outputs/gpu/$MODEL}
PYTHON=${PYTHON:-python}
read -ra TRAIN <<< "${TRAIN:-data.shards=16 data.shard_size=4096 data.batch_size=512 \
  trainer.batch_tokens=4096 trainer.holdout=512 trainer.vocabulary=8192}"
read -ra EVALUATE <<< "${EVALUATE:-}"
read -ra SPEED <<< "${SPEED:-}"

"$PYTHON" train.py "model=$MODEL" "output=$OUT" "data.path=$OUT/data" \
  "adapter.exit_layers=[$EXITS]" "${TRAIN[@]}"
for exit in ${EXITS//,/ }; do
  adapter="drafter.adapter=\"$OUT/attention-exit$exit\""
  "$PYTHON" evaluate.py "model=$MODEL" "$adapter" "output=$OUT/evaluate-exit$exit" "${EVALUATE[@]}"
  "$PYTHON" scripts/bench.py "model=$MODEL" "$adapter" "output=$OUT/speed-exit$exit" "${SPEED[@]}"
done

#!/usr/bin/env bash
# All that wants a GPU in one go: the tests that need one; steps, verifications, batches and memory of
# models of 7B shape with random weights; then the model writes data, adapters of three kinds for
# several exit layers and Medusa's heads are trained from one frozen pass, compared on held-out text,
# and each is evaluated and timed; at last all methods side by side, at the papers' settings. Run
# again, it goes on where it was stopped.
#
#   scripts/gpu.sh                                   # SmolLM2-135M into outputs/gpu/smollm2-135m
#   MODEL=llama-3.2-1b EXITS=2,3 scripts/gpu.sh
#
# SHAPES names the shapes of random weights (kangaroo/shapes.py; empty: none). DATA takes further
# overrides for the data, TRAIN, COMPARE, EVALUATE and SPEED for the four commands.
set -euo pipefail
cd "$(dirname "$0")/.."

MODEL=${MODEL:-smollm2-135m}
EXITS=${EXITS:-2,3,4,6}
OUT=${OUT:-outputs/gpu/$MODEL}
PYTHON=${PYTHON:-python}
read -ra DATA <<< "model=$MODEL data.path=$OUT/data \
  ${DATA:-data.shards=16 data.shard_size=4096 data.batch_size=512}"
read -ra TRAIN <<< "${TRAIN:-trainer.batch_tokens=4096 trainer.holdout=512 trainer.vocabulary=8192 \
  trainer.remember=true}"
read -ra COMPARE <<< "${COMPARE:-compare.holdout=512 compare.prompts=128}"
read -ra EVALUATE <<< "${EVALUATE:-}"
read -ra SPEED <<< "${SPEED:-speed.batches=[1,2,4,8,16,32,64]}"
read -ra SHAPES <<< "${SHAPES-lmsys/vicuna-7b-v1.3 meta-llama/Llama-3.1-8B-Instruct}"

"$PYTHON" -m pytest -q -m gpu tests || [ $? -eq 5 ] # 5: this machine has none to run
for shape in "${SHAPES[@]}"; do
  "$PYTHON" scripts/bench.py model=tiny "model.name=random-${shape##*/}" "model.path=\"random:$shape\"" \
    model.dtype=bfloat16 drafter.adapter=\"untrained:2\" drafter.threshold=0 speed.rivals=false \
    "output=$OUT/random-${shape##*/}" "${SPEED[@]}"
done

"$PYTHON" train.py "${DATA[@]}" "output=$OUT" adapter=fused "adapter.exit_layers=[$EXITS]" \
  +adapter@more.layer=layer "more.layer.exit_layers=[$EXITS]" \
  +adapter@more.attention=attention "more.attention.exit_layers=[$EXITS]" \
  +adapter@more.medusa=medusa "${TRAIN[@]}"

folders=()
for kind in fused layer attention; do
  for exit in ${EXITS//,/ }; do
    folders+=("$OUT/$kind-exit$exit")
  done
done
list=$(IFS=,; echo "${folders[*]}")
"$PYTHON" scripts/compare.py "${DATA[@]}" "output=$OUT/compare" "compare.adapters=[$list]" "${COMPARE[@]}"
for folder in "${folders[@]}"; do
  adapter="drafter.adapter=\"$folder\"" name=$(basename "$folder")
  "$PYTHON" evaluate.py "model=$MODEL" "$adapter" "output=$OUT/evaluate-$name" "${EVALUATE[@]}"
  "$PYTHON" scripts/bench.py "model=$MODEL" "$adapter" "output=$OUT/speed-$name" "${SPEED[@]}"
done

# all methods, each job with its own baselines, in one folder
"$PYTHON" scripts/search_layers.py "${DATA[@]}" "output=$OUT/layerskip.json"
"$PYTHON" scripts/build_datastore.py "${DATA[@]}" "output=$OUT/datastore"
adapter="drafter.adapter=\"${BEST:-$OUT/attention-exit${EXITS%%,*}}\""
method() {
  "$PYTHON" evaluate.py -m "model=$MODEL" "hydra.sweep.dir=$OUT/methods" "${EVALUATE[@]}" "$@"
}
method drafter=vanilla
method drafter=kangaroo,draft_model "$adapter"
method drafter=kangaroo_tree drafter.top_k=10 drafter.nodes=32 drafter.steps=6 "$adapter"
method drafter=medusa drafter.nodes=63 "drafter.heads=\"$OUT/medusa\""
method drafter=lookahead drafter.window=15 drafter.ngram=5 drafter.guesses=15
method drafter=prompt_lookup drafter.num_pred_tokens=10
method drafter=rest drafter.num_draft=64 "drafter.datastore=\"$OUT/datastore\""
method drafter=layerskip "drafter.subset=\"$OUT/layerskip.json\""
method drafter=cascade drafter.first.num_pred_tokens=10 "${adapter/drafter./drafter.second.}"

#!/usr/bin/env bash
# What wants a GPU, in stages of a few minutes, the most valuable first. All of them in order, or those
# that are named; a stage that is done is not done again, and one that was stopped goes on.
#
#   scripts/gpu.sh                     # all, into outputs/gpu; 29 minutes at most
#   scripts/gpu.sh check shapes
#   QUESTIONS=questions.jsonl scripts/gpu.sh    # training text: answers to these (docs/data.md), not self-written
#   DRY=1 scripts/gpu.sh               # the same lengths and memory checks on small random models, on a CPU
#   python scripts/gpu_page.py outputs/gpu docs/gpu.md      # the results as a page
#
#   check    the tests that need a GPU: every drafter against vanilla, half precision, training
#   shapes   random weights of 7B and 8B shape against the memory's limit: steps, verification, batches
#   data     SmolLM2-135M writes its training text, for as long as the stage lasts
#   train    adapters of three kinds and Medusa's heads from one frozen pass over that text
#   adapters the adapters on held-out text; the best of them on the demo bench and against the limit
#   methods  all methods side by side, at the papers' sizes
#   pack     what is worth keeping, as results.tgz
set -uo pipefail
cd "$(dirname "$0")/.."

RESULTS=${RESULTS:-outputs/gpu}
PYTHON=${PYTHON:-python}
BEST=${BEST:-attention-exit2} # the adapter that the later stages decode with
SHAPES="lmsys/vicuna-7b-v1.3 meta-llama/Llama-3.1-8B-Instruct"
EXITS="[2,3]"
MODEL=(model=smollm2-135m)
SIZES=(hardware=gpu) # of trees and drafts: the papers'
GIB=(4 64 24 16 8 8 0) # of memory that each stage needs, in the order below
SECONDS_OF=(300 360 300 360 180 210 30)
STAGES=(check shapes data train adapters methods pack)
# sizes of the work; DRY keeps lengths and shapes of calls, and does less of each
TESTS=(-m gpu tests)
SPEED=("speed.contexts=[256,1024,2000]" "speed.batches=[1,4,16]" speed.prompts=6)
SHARDS=64 SHARD=2048 # at most, and conversations of each
DATA=("data.shard_size=$SHARD" data.batch_size=1024)
TRAIN=(trainer.batch_tokens=4096 trainer.holdout=512 trainer.vocabulary=8192 trainer.epochs=2)
COMPARE=(compare.holdout=512 compare.prompts=64)
EVALUATE=(question_every=4 warmup=1)
if [ -n "${DRY:-}" ]; then
  SHAPES="small:lmsys/vicuna-7b-v1.3 small:meta-llama/Llama-3.1-8B-Instruct"
  MODEL=(model=tiny "model.path='random:small:embedded:smollm2-135m'")
  GIB=(1 2 2 2 2 2 0)
  TESTS=(-m "not slow and not gpu" tests/test_attention.py)
  SPEED+=(speed.prompts=2 speed.repeats=1 speed.bandwidth_megabytes=64 speed.new_tokens=32)
  SHARDS=2 SHARD=8
  DATA=("data.shard_size=$SHARD" data.filters.max_repetition=1 data.filters.near_duplicate=1)
  TRAIN=(trainer.batch_tokens=4096 trainer.holdout=4 trainer.epochs=1 trainer.decode_prompts=2)
  COMPARE=(compare.holdout=4 compare.prompts=2)
  EVALUATE=(question_every=22 warmup=1 max_new_tokens=16)
fi
DATA+=("data.path=$RESULTS/data")
if [ -n "${QUESTIONS:-}" ]; then
  DATA+=(data=conversations "data.source='$QUESTIONS'" data.max_answer_tokens=256)
elif [ -n "${DRY:-}" ]; then
  DATA+=(data.keep_unfinished_questions=true)
fi

# A command, until the stage's time is over. What was saved is there for the next time.
run() {
  echo "+ $*"
  timeout "$((until_second - SECONDS > 1 ? until_second - SECONDS : 1))" "$PYTHON" "$@"
}

check() { run -m pytest -q "${TESTS[@]}" 2>&1 | tee "$RESULTS/check.log"; }

shapes() {
  local shape name
  for shape in $SHAPES; do
    name=${shape##*/}
    [ -f "$RESULTS/shapes/$name/speed.json" ] && continue
    run scripts/speed.py model=tiny "model.name=random-$name" "model.path='random:$shape'" \
      model.dtype=float16 "drafter.adapter='untrained:2'" drafter.threshold=0 speed.rivals=false \
      "output=$RESULTS/shapes/$name" "${SPEED[@]}" || return
  done
}

shards() { find "$RESULTS/data.shards" -name '*.jsonl' 2> /dev/null | wc -l; }

# So many shards of text.
amount() { if [ -n "${QUESTIONS:-}" ]; then echo "data.limit=$(($1 * SHARD))"; else echo "data.shards=$1"; fi; }

data() { # ends well when its time is over: the shards that are whole are enough
  run scripts/make_data.py "${MODEL[@]}" "${DATA[@]}" "$(amount "$SHARDS")" || [ "$(shards)" -gt 0 ]
}

train() {
  [ "$(shards)" -gt 0 ] || { echo "there is no data: the stage before has to be done first"; return 1; }
  run train.py "${MODEL[@]}" "${DATA[@]}" "$(amount "$(shards)")" "output=$RESULTS/train" \
    "adapter.exit_layers=$EXITS" +adapter@more.layer=layer "more.layer.exit_layers=$EXITS" \
    +adapter@more.fused=fused "more.fused.exit_layers=$EXITS" +adapter@more.medusa=medusa "${TRAIN[@]}"
}

adapters() {
  local folder list best="drafter.adapter='$RESULTS/train/$BEST'"
  list=$(printf ",%s" "$RESULTS"/train/*-exit*)
  run scripts/compare.py "${MODEL[@]}" "${DATA[@]}" "$(amount "$(shards)")" "output=$RESULTS/adapters/compare" \
    "compare.adapters=[${list:1}]" "${COMPARE[@]}" &&
    run scripts/speed.py "${MODEL[@]}" "${SIZES[@]}" "$best" "output=$RESULTS/adapters/speed" "${SPEED[@]}"
}

methods() { # each job with its own baselines, in one folder; compared after every job
  local sweep=("${MODEL[@]}" "${SIZES[@]}" "hydra.sweep.dir=$RESULTS/methods" "baselines=[vanilla]" "${EVALUATE[@]}")
  local adapter="drafter.adapter='$RESULTS/train/$BEST'"
  run evaluate.py -m "${sweep[@]}" drafter=vanilla,lookahead,prompt_lookup &&
    run evaluate.py -m "${sweep[@]}" drafter=kangaroo,kangaroo_tree,draft_model "$adapter" &&
    run evaluate.py -m "${sweep[@]}" drafter=medusa "drafter.adapter='$RESULTS/train/medusa'" &&
    run evaluate.py -m "${sweep[@]}" drafter=cascade "${adapter/drafter./drafter.second.}"
}

pack() { # no data, no checkpoints
  local made
  made=$(mktemp) && tar -czf "$made" -C "$RESULTS" --exclude='*.tgz' --exclude='./data*' \
    --exclude='checkpoint.*' --exclude='*.part' . && mv "$made" "$RESULTS/results.tgz" &&
    ls -l "$RESULTS/results.tgz"
}

# Memory that the target's device has free, at least so many GiB.
room() {
  "$PYTHON" - "$1" "$2" << 'PY'
import sys
from kangaroo.estimate.devices import found
from kangaroo.models import ModelConfig

stage, needed = sys.argv[1], float(sys.argv[2])
device = found(ModelConfig("any", "any"))
free = device.free / 2**30
if free < needed:
    raise SystemExit(f"{stage} needs {needed:.0f} GiB and {device.name} has {free:.1f} GiB free.")
PY
}

mkdir -p "$RESULTS"
asked=("$@")
[ $# -gt 0 ] || asked=("${STAGES[@]}")
failed=0
for i in "${!STAGES[@]}"; do
  stage=${STAGES[$i]} seconds=${SECONDS_OF[$i]}
  [[ " ${asked[*]} " == *" $stage "* ]] || continue
  if [ -f "$RESULTS/$stage.done" ]; then
    echo "== $stage is done already (delete $RESULTS/$stage.done to do it again)"
    continue
  fi
  echo "== $stage, $seconds s at most"
  room "$stage" "${GIB[$i]}" || { failed=1; continue; }
  begun=$SECONDS
  until_second=$((SECONDS + seconds))
  if "$stage"; then
    echo "$((SECONDS - begun))" > "$RESULTS/$stage.done"
    echo "== $stage took $((SECONDS - begun)) s"
  else
    echo "== $stage did not end well after $((SECONDS - begun)) s; the same command goes on with it" >&2
    failed=1
  fi
done
for stage in "${asked[@]}"; do
  [[ " ${STAGES[*]} " == *" $stage "* ]] || { echo "no stage '$stage'; there are ${STAGES[*]}" >&2; failed=1; }
done
exit $failed

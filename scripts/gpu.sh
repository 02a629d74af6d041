#!/usr/bin/env bash
# What wants a GPU, in 16 minutes on one: stages of at most five, the most valuable first. All of them, or
# those that are named; then docs/results/gpu.md says what they found. A stage that is done is not done again; one
# that fails or runs out of its time stops no other, and the same command tries it again. No network is needed.
#
#   scripts/gpu.sh                                # all, into outputs/gpu
#   scripts/gpu.sh check shapes                   # `shapes` is 7b and 8b
#   QUESTIONS=question.jsonl scripts/gpu.sh       # methods on Spec-Bench's questions, not on the demo's
#   DRY=1 scripts/gpu.sh                          # the same commands in small, on a CPU; the page is outputs/gpu/gpu.md
#
#   check    the tests that need a GPU
#   7b       random weights of Vicuna-7B's shape against the memory's read rate, and transformers
#   8b       the same of Llama-3.1-8B's, at longer contexts
#   methods  SmolLM2-135M by all methods in turn, at the papers' sizes
#   train    how fast an adapter for 7B trains
#   soak     every drafter in bfloat16 against vanilla, 10^5 tokens
set -uo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1

RESULTS=${RESULTS:-outputs/gpu}
PYTHON=${PYTHON:-python}
PAGE=${PAGE:-docs/results/gpu.md}
STAGES=(check 7b 8b methods train soak)
SECONDS_OF=(300 175 100 240 80 80)
# sizes of the work; DRY does less of each
TESTS=(-n 8 --dist worksteal -m gpu tests)
SHAPE=random:
SPEED=(speed.repeats=1 speed.max_new_tokens=64 speed.context_tokens=48 speed.bandwidth_megabytes=8192)
SPEED_7B=("speed.contexts=[256,1024,1900]" "speed.batches=[1,4,16,32,64]" speed.prompts=3)
SPEED_8B=("speed.contexts=[256,2048,8144]" "speed.batches=[1,16]" speed.prompts=2)
EVALUATE=(bench=demo question_every=3 max_new_tokens=64)
[ -z "${QUESTIONS:-}" ] || EVALUATE=(bench=spec_bench "bench.path='$QUESTIONS'" question_every=20 max_new_tokens=64)
CONVERSATIONS=264 # of nearly 2,048 tokens, 4 in a micro-batch: 32 steps
TOKENS=100000
if [ -n "${DRY:-}" ]; then
  [ "$PAGE" != docs/results/gpu.md ] || PAGE=$RESULTS/gpu.md
  TESTS=(tests/cli/test_terminal.py)
  SHAPE=random:small:
  SECONDS_OF=(600 600 600 600 600 600)
  SPEED+=(speed.prompts=1 speed.max_new_tokens=8 speed.context_tokens=8 speed.bandwidth_megabytes=64 "speed.batches=[1,4]" "speed.contexts=[64,256]")
  EVALUATE=("${EVALUATE[@]/question_every=*/question_every=40}" max_new_tokens=4)
  CONVERSATIONS=10
  TOKENS=2000
fi

shape() { # name, path, dtype, and what is measured
  COMMAND=(scripts/speed.py model=tiny "model.name=$1" "model.path='$SHAPE$2'" "model.dtype=$3"
    "drafter.adapter='untrained:2'" drafter.threshold=0 "output=$RESULTS/$1" "${@:4}" "${SPEED[@]}")
}

# Random words, since only their number counts.
conversations() {
  "$PYTHON" - "$CONVERSATIONS" << 'PY'
import json, random, sys

words = [f"word{i}" for i in range(1000)]


def say(speaker, count):
    return {"from": speaker, "value": " ".join(random.choices(words, k=count))}


talks = [[say("human", 30), say("gpt", 200)] for _ in range(int(sys.argv[1]))]
json.dump([{"id": str(i), "conversations": talk} for i, talk in enumerate(talks)], sys.stdout)
PY
}

command_of() {
  case $1 in
    check) COMMAND=(-m pytest -q "${TESTS[@]}") ;;
    7b) shape 7b lmsys/vicuna-7b-v1.3 float16 "${SPEED_7B[@]}" ;;
    8b) shape 8b meta-llama/Llama-3.1-8B-Instruct bfloat16 "${SPEED_8B[@]}" ;;
    methods)
      COMMAND=(evaluate.py model=smollm2-135m experiment=methods hardware=gpu "output=$RESULTS/methods" "${EVALUATE[@]}")
      ;;
    train)
      conversations > "$RESULTS/conversations.json"
      COMMAND=(train.py model=vicuna-7b "model.path='${SHAPE}lmsys/vicuna-7b-v1.3'" trainer.epochs=1 trainer.holdout=8
        trainer.accumulate=2 "data.source='$RESULTS/conversations.json'"
        "data.path='$RESULTS/data'" "output=$RESULTS/train")
      ;;
    soak)
      export SOAK_TOKENS=$TOKENS SOAK_DTYPE=bfloat16 SOAK_OUTPUT=$RESULTS/soak
      [ -n "${DRY:-}" ] || export SOAK_DEVICE=cuda
      COMMAND=(-m pytest -q -s -m soak tests/soak)
      ;;
  esac
}

asked=("$@")
[ $# -gt 0 ] || asked=("${STAGES[@]}")
asked=" ${asked[*]} "
asked=${asked/ shapes / 7b 8b }
for stage in $asked; do
  [[ " ${STAGES[*]} " == *" $stage "* ]] || { echo "no stage '$stage'; there are ${STAGES[*]} and shapes" >&2; exit 1; }
done
mkdir -p "$RESULTS"
about=$("$PYTHON" -c 'import json; from kangaroo.utils.provenance import provenance; print(json.dumps(provenance()))') || exit
if [ -z "${DRY:-}" ] && [[ $about == *'"cuda": null'* ]]; then
  echo "there is no GPU here; DRY=1 $0 runs the same commands in small on a CPU" >&2
  exit 1
fi

failed=0
for i in "${!STAGES[@]}"; do
  stage=${STAGES[$i]} limit=${SECONDS_OF[$i]} record="$RESULTS/${STAGES[$i]}.json"
  [[ $asked == *" $stage "* ]] || continue
  if grep -q '"status": 0,' "$record" 2> /dev/null; then
    echo "== $stage is done already (delete $record to do it again)"
    continue
  fi
  command_of "$stage"
  echo "== $stage, $limit s at most: ${COMMAND[*]}"
  begun=$SECONDS
  # interrupted, a command still says how far it came
  timeout --signal=INT --kill-after=5 "$limit" "$PYTHON" "${COMMAND[@]}" 2>&1 | tee "$RESULTS/$stage.log"
  status=$?
  echo "{\"status\": $status, \"seconds\": $((SECONDS - begun)), \"limit\": $limit, \"about\": $about}" > "$record"
  echo "== $stage ended with status $status after $((SECONDS - begun)) s"
  [ "$status" -eq 0 ] || failed=1
done
"$PYTHON" scripts/gpu/page.py "$RESULTS" "$PAGE" || failed=1
exit $failed

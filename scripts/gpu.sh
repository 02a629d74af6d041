#!/usr/bin/env bash
# The checks that need a GPU, in two parts, for a GPU that is there for minutes only: each stage has a time limit, and
# the longest and least certain ones are last. After every stage the page docs/results/gpu.md says what is known. A
# stage that is done does not run again; one that fails or takes too long stops no other, and the same command retries it.
#
#   scripts/gpu.sh part1                # at most 260 s, into outputs/gpu
#   scripts/gpu.sh part2                # at most 480 s
#   scripts/gpu.sh kernels 8b           # some stages
#   DRY=1 scripts/gpu.sh part1 part2    # the same commands in small, on a CPU, into outputs/gpu-dry
#
# part1
#   bits      a token's bits are the same at every width, in Triton as compiled here
#   kernels   products, attention and decoding of the 7B shape
#   tests     the tests that need a GPU, but for what `soak` does
#   soak      every drafter in bfloat16 against vanilla
# part2
#   plain     how fast a plain adapter for 7B trains
#   fused     and a fused one, by several draft steps
#   7b        random weights of Vicuna-7B's shape: contexts and batches
#   8b        Llama-3.1-8B's at long contexts
#   adapter   SmolLM2-135M writes text for a minute, and trains an adapter on it
#   drafters  three drafters with that adapter, on the demo's questions
# and in no part
#   methods   SmolLM2-135M by all methods in turn, at the papers' sizes
set -uo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1

RESULTS=${RESULTS:-outputs/gpu${DRY:+-dry}}
PYTHON=${PYTHON:-python}
PAGE=${PAGE:-docs/results/gpu.md}
PART1=(bits kernels tests soak)
PART2=(plain fused 7b 8b adapter drafters)
STAGES=("${PART1[@]}" "${PART2[@]}" methods)
declare -A LIMIT=([bits]=20 [kernels]=60 [tests]=120 [soak]=60)
LIMIT+=([plain]=50 [fused]=50 [7b]=90 [8b]=70 [adapter]=120 [drafters]=100 [methods]=240)
# sizes of the work; DRY does less of each
TESTS=(-m gpu tests --ignore=tests/drafters/test_conformance.py)
BITS=(tests/cuda/interpreted -k "bits or width" -m "not slow")
SHAPE=random:
SPEED=(speed.repeats=1 speed.max_new_tokens=64 speed.context_tokens=48 speed.bandwidth_megabytes=8192 speed.prompts=1)
KERNELS=("speed.contexts=[256]" "speed.batches=[1,16]")
SPEED_7B=("speed.contexts=[256,1900]" "speed.batches=[1,16,64,256]")
SPEED_8B=("speed.contexts=[8144,32000]" "speed.batches=[1]")
CONVERSATIONS=136 # of nearly 2,048 tokens, 4 in a micro-batch: 16 steps
WRITTEN=(data.shards=1 data.shard_size=256 data.batch_size=256 data.max_answer_tokens=256)
EVALUATE=(bench=demo question_every=3 max_new_tokens=64)
TOKENS=60000
if [ -n "${DRY:-}" ]; then
  [ "$PAGE" != docs/results/gpu.md ] || PAGE=$RESULTS/gpu.md
  TESTS=(tests/cli/test_terminal.py)
  BITS=(tests/cli/test_terminal.py)
  SHAPE=random:small:
  for stage in "${STAGES[@]}"; do LIMIT[$stage]=600; done
  SPEED+=(speed.max_new_tokens=8 speed.context_tokens=8 speed.bandwidth_megabytes=64)
  KERNELS=("speed.batches=[1]" "speed.contexts=[64]")
  SPEED_7B=("speed.batches=[1,4]" "speed.contexts=[64,256]")
  SPEED_8B=("speed.batches=[1,4]" "speed.contexts=[64,256]")
  CONVERSATIONS=10
  WRITTEN=(data.shards=1 data.shard_size=12 data.max_question_tokens=8 data.max_answer_tokens=16
    data.keep_unfinished_questions=true data.filters.max_repetition=1 data.filters.near_duplicate=1
    trainer.epochs=1 trainer.holdout=4)
  EVALUATE=(bench=demo question_every=40 max_new_tokens=4)
  TOKENS=2000
fi

shape() { # stage, path, dtype, and what is measured
  COMMAND=(scripts/speed.py model=tiny "model.name=$1" "model.path='$SHAPE$2'" "model.dtype=$3"
    "drafter.adapter='untrained:2'" drafter.threshold=0 "output=$RESULTS/$1" "${SPEED[@]}" "${@:4}")
}

training() { # stage, and the adapter
  conversations > "$RESULTS/conversations.json"
  COMMAND=(train.py model=vicuna-7b "model.path='${SHAPE}lmsys/vicuna-7b-v1.3'" trainer.epochs=1 trainer.holdout=8
    trainer.accumulate=2 "data.source='$RESULTS/conversations.json'" "data.path='$RESULTS/data'"
    "output=$RESULTS/$1" "${@:2}")
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

command_of() { # sets COMMAND
  case $1 in
    bits) COMMAND=(-m pytest -q -p no:xdist "${BITS[@]}") ;;
    kernels) shape kernels lmsys/vicuna-7b-v1.3 float16 "${KERNELS[@]}" ;;
    tests) COMMAND=(-m pytest -q "${TESTS[@]}") ;;
    soak)
      export SOAK_TOKENS=$TOKENS SOAK_DTYPE=bfloat16 SOAK_OUTPUT=$RESULTS/soak
      [ -n "${DRY:-}" ] || export SOAK_DEVICE=cuda
      COMMAND=(-m pytest -q -s -m soak tests/soak)
      ;;
    plain) training plain adapter=attention ;;
    fused) training fused adapter=fused ;;
    7b) shape 7b lmsys/vicuna-7b-v1.3 float16 "${SPEED_7B[@]}" ;;
    8b) shape 8b meta-llama/Llama-3.1-8B-Instruct bfloat16 "${SPEED_8B[@]}" ;;
    adapter)
      COMMAND=(train.py model=smollm2-135m adapter=attention adapter.name=brief "data.path='$RESULTS/written'"
        "output=$RESULTS/adapter" "${WRITTEN[@]}")
      ;;
    drafters)
      trained=$(echo "$RESULTS"/adapter/brief-exit*)
      COMMAND=(evaluate.py model=smollm2-135m drafter=kangaroo "drafter.adapter='$trained'" +drafter@more.hybrid=hybrid
        "more.hybrid.adapter='$trained'" +drafter@more.tree=kangaroo_tree "more.tree.adapter='$trained'"
        "output=$RESULTS/drafters" "${EVALUATE[@]}")
      ;;
    methods)
      COMMAND=(evaluate.py model=smollm2-135m experiment=methods hardware=gpu "output=$RESULTS/methods" "${EVALUATE[@]}")
      ;;
  esac
}

asked=("$@")
[ $# -gt 0 ] || asked=(part1 part2)
asked=" ${asked[*]} "
asked=${asked/ part1 / ${PART1[*]} }
asked=${asked/ part2 / ${PART2[*]} }
for stage in $asked; do
  [[ " ${STAGES[*]} " == *" $stage "* ]] || { echo "no stage '$stage'; there are part1, part2 and ${STAGES[*]}" >&2; exit 1; }
done
mkdir -p "$RESULTS"
RESULTS=$(cd "$RESULTS" && pwd)
about=$("$PYTHON" -c 'import json; from kangaroo.utils.provenance import provenance; print(json.dumps(provenance()))') || exit
if [ -z "${DRY:-}" ] && [[ $about == *'"cuda": null'* ]]; then
  echo "there is no GPU here; DRY=1 $0 runs the same commands in small on a CPU" >&2
  exit 1
fi

failed=0
for stage in $asked; do
  limit=${LIMIT[$stage]} record="$RESULTS/$stage.json"
  if grep -q '"status": 0,' "$record" 2> /dev/null; then
    echo "== $stage is done already (delete $record to do it again)"
    continue
  fi
  command_of "$stage"
  echo "== $stage, $limit s at most: ${COMMAND[*]}"
  begun=$SECONDS
  # interrupted, a command still says how far it came
  PYTHONPATH=. timeout --signal=INT --kill-after=5 "$limit" "$PYTHON" "${COMMAND[@]}" 2>&1 | tee "$RESULTS/$stage.log"
  status=$?
  echo "{\"status\": $status, \"seconds\": $((SECONDS - begun)), \"limit\": $limit, \"about\": $about}" > "$record"
  echo "== $stage ended with status $status after $((SECONDS - begun)) s"
  [ "$status" -eq 0 ] || failed=1
  "$PYTHON" scripts/gpu/page.py "$RESULTS" "$PAGE" || failed=1
done
exit $failed

#!/bin/bash
# Measure the zoo's transformers with AdamW, eager and compiled, and Llamas of few layers, in order of importance.
#
#     bash validation/zoo/measure_transformers.sh OUT [SECONDS] [DEVICE]
#
# Profiles are saved as they are taken (OUT/NAME.json.gz, logs beside them). Nothing new is begun past SECONDS (default
# 360), and a second call goes on where the first stopped.
out=$1
limit=${2:-360}
device=${3:-cuda}
each=${EACH_S:-2}
batch=${BATCH_SIZE:+--batch-size $BATCH_SIZE}
models=${MODELS:-bert_base,bert_large,gpt2,gpt2_medium,t5_base,vit_b,vit_l,llama_1b}
compiled=${COMPILED:-llama_1b,gpt2,bert_large,vit_l,gpt2_medium,t5_base,bert_base,vit_b}
python=${PYTHON:-python3}
here=$(dirname "$0")
mkdir -p "$out"
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-/tmp/inductor} PYTHONUNBUFFERED=1
export TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-14}

script() { # LOG SCRIPT [options]: with what is left of the time
  local log=$out/$1 script=$2 began=$SECONDS
  shift 2
  [ "$SECONDS" -lt "$limit" ] || { echo "no time left for $script $*"; return; }
  timeout $((limit - SECONDS + 20)) "$python" "$here/$script" "$@" --device "$device" >>"$log" 2>&1
  grep -h " ms = \|FAILED\|Error:\|_ms'" "$log" | cut -c1-240
  echo "  $script $*: $((SECONDS - began)) s"
}

zoo() { # LOG MODELS [measure.py's options]
  local log=$1 models=$2
  shift 2
  script "$log" measure.py "$out" --no-traces --main-only --precisions bf16 --optimizer adamw --accept-noise \
    --models "$models" --each-s "$each" --limit "$((limit - SECONDS))s" $batch "$@"
}

zoo adamw.log "$models"
script layers.log measure_layers.py "$out" --each-s "$each" $batch
zoo compile.log "$compiled" --compile
for model in ${compiled//,/ }; do # one by one what a crash has kept from being measured
  ls "$out"/"${model//_/-}"-b*-bf16-adamw-compile-*.json.gz >/dev/null 2>&1 || zoo "compile-$model.log" "$model" --compile
done
script compare.log compare_compile.py -o "$out/compile.json" $batch
echo "$(ls "$out"/*.json.gz | wc -l) profiles"

#!/bin/bash
# Measures kvweave's plug-in in SGLang on this machine's GPU, in several settings of SGLang.
#   deploy/sglang-gpu.sh [MODEL] [FOLDER]
# Run it in an environment with SGLang 0.5.23 and kvweave (docs/sglang.md). FOLDER gets, for every
# setting, the figures as JSON and the server's log. Two GPUs: SETTINGS="tp2" deploy/sglang-gpu.sh
set -u
model=${1:-Qwen/Qwen2.5-7B-Instruct}
folder=${2:-out/sglang-gpu}
port=${PORT:-30000}
sizes=${SIZES:-1024 4096 16384}
prompts=${PROMPTS:-24}

declare -A flags=(
    [default]=""
    [sequential]="--disable-overlap-schedule"
    [paged]="--page-size 16"
    [triton]="--attention-backend triton"
    [mixed]="--enable-mixed-chunk --chunked-prefill-size 2048"
    [tp2]="--tp-size 2"
)

mkdir -p "$folder"
nvidia-smi >"$folder/nvidia-smi.txt" 2>&1
for setting in ${SETTINGS:-default sequential paged triton mixed}; do
    echo "$setting: starting SGLang with $model ${flags[$setting]}"
    # shellcheck disable=SC2086
    python -m sglang.launch_server --model-path "$model" --port "$port" \
        --radix-cache-backend fuzzy_match --enable-cache-report --enable-metrics \
        ${flags[$setting]} >"$folder/$setting.log" 2>&1 &
    server=$!
    until curl -sf "http://127.0.0.1:$port/health" >/dev/null; do
        if ! kill -0 "$server" 2>/dev/null; then
            echo "$setting: SGLang did not start; see $folder/$setting.log"
            continue 2
        fi
        sleep 2
    done
    grep kvweave "$folder/$setting.log"
    # shellcheck disable=SC2086
    python -m kvweave_bench.in_sglang --url "http://127.0.0.1:$port" --sizes $sizes \
        --n "$prompts" --json "$folder/$setting.json"
    kill "$server"
    wait "$server" 2>/dev/null
    echo "$setting: $(grep -c Traceback "$folder/$setting.log") tracebacks in the log"
done
echo "Send the folder $folder with an issue."

#!/usr/bin/env bash
# Measures on a GPU host in stages, each with a time limit: OUT_DIR STAGE…
#   check  train  rollout  weights  ours  verl  learn  trimmed      SHAPE=0.5B|1.5B chooses the model, RESPONSE the response length
#   OPTIONS=--split with weights: the actor on one GPU and the engine on another
# Needs torch, vLLM, Ray and transformers on PYTHONPATH; `verl` also needs verl and RIG, the directory of verl_ppo.sh;
# `learn` needs LEARN, a directory with data/ (trainer data arithmetic) and warm-start/ (trainer sft).
# Rows go to OUT_DIR/results.jsonl, logs beside it; a stage that fails or is cut short does not stop the others.
set -u
out=$1; shift
shape=${SHAPE:-0.5B} response=${RESPONSE:-512} rig=${RIG:-/tmp/rig}
root=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$out"; cd "$root" || exit 1
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export RAY_AUTH_MODE=disabled RAY_DEDUP_LOGS=0 VLLM_USE_FLASHINFER_SAMPLER=0

stage() { # NAME LIMIT COMMAND…
  local name=$1 limit=$2 start=$SECONDS; shift 2
  timeout --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1
  echo "== $name: exit $?, $((SECONDS - start)) s"
  grep -h '^{' "$out/$name.log" || tail -n 15 "$out/$name.log"
}
bench() { python3 -m "benchmarks.gpu.$1" --out "$out/results.jsonl" "${@:2}"; }
export -f bench; export out

for name in "$@"; do
  case $name in
    check) stage check 120 bash -c 'bench check' ;;
    train) stage "train-$shape" "${LIMIT:-150}" bash -c "bench train_step --shape $shape --profile $out ${OPTIONS:-}" ;;
    rollout) stage "rollout-$shape" "${LIMIT:-260}" bash -c "bench rollout --shape $shape --profile $out ${OPTIONS:-}" ;;
    weights) stage "weights-$shape" "${LIMIT:-150}" bash -c "bench weights --shape $shape ${OPTIONS:-}" ;;
    ours | verl)
      stage "$name-$shape-$response" "${LIMIT:-420}" bash -c "bench ppo_step --side $name --shape $shape --response $response \
        --verl $rig --logs $out/logs --timeout $((${LIMIT:-420} - 20)) ${OPTIONS:-}"
      tail -n 5 "$out/logs/$name-$shape-$response.log" ;;
    learn)
      stage learn "${LIMIT:-200}" python3 -m trainer train "data.train_files=$LEARN/data/train.parquet" \
        "data.validation_files=$LEARN/data/validation.parquet" "model.path=$LEARN/warm-start" model.dtype=bfloat16 \
        "trainer.output_dir=$out/runs" trainer.run_id=learn actor.learning_rate=5e-5 critic.learning_rate=1e-3 \
        actor.micro_batch_tokens=16384 critic.micro_batch_tokens=16384 rollout.kv_cache_gib=4 trainer.total_steps=60 \
        trainer.test_freq=5 trainer.stop_at=0.99 trainer.save_freq=0
      cp "$out/runs/learn/metrics.jsonl" "$out/learn.jsonl" ;;
    trimmed) stage trimmed 150 bash -c "bench trimmed --variant ${VARIANT:-vllm0.26-torch2.11-cu130} --logs $out/trimmed" ;;
    *) echo "unknown stage $name" >&2; exit 2 ;;
  esac
done

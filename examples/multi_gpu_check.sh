#!/usr/bin/env bash
# Everything that only several GPUs of one host can show, in under eight minutes: the bits with a process a GPU and with
# one process for all GPUs, and the times of every peer that runs there.
#
#     examples/multi_gpu_check.sh [FOLDER]    # default: multi_gpu_check
#
# FOLDER gets log, a JSON file of each part and the plot; the last lines are a table of the parts. The exit status is the
# number of parts that failed. GPUS=N takes the first N GPUs only. Multicast objects are left to the environment:
# TORCH_SYMM_MEM_DISABLE_MULTICAST=1 keeps this library, torch and, with NCCL_NVLS_ENABLE=0, NCCL from making any.
set -uo pipefail

out=$(mkdir -p "${1:-multi_gpu_check}" && cd "${1:-multi_gpu_check}" && pwd) || exit 1
exec > >(tee "$out/log") 2>&1
export CUDA_MODULE_LOADING=EAGER PYTHONUNBUFFERED=1 XLA_PYTHON_CLIENT_PREALLOCATE=false
export JAX_TWOSHOT_TIMEOUT=${JAX_TWOSHOT_TIMEOUT:-60}

gpus=${GPUS:-$(nvidia-smi -L | wc -l)}
if ((gpus < 2)); then
  echo "multi_gpu_check.sh needs two NVIDIA GPUs or more, this machine has $gpus; several ranks on one GPU are" \
    "python -m jax_twoshot selftest --ranks 2,4,8 --one-gpu" >&2
  exit 1
fi
ranks=$(for n in 2 4 8; do ((n > gpus)) || printf '%s,' $n; done)
ranks=${ranks%,}
devices=${ranks##*,}

table="" failed=0
part() {  # NAME SECONDS COMMAND...
  local name=$1 limit=$2 start=$SECONDS status
  shift 2
  printf '\n=== %s\n' "$name"
  timeout -k 10 "$limit" "$@"
  status=$?
  ((status == 0)) || ((failed += 1))
  table+=$(printf '%-44s exit status %3d  %4d s' "$name" $status $((SECONDS - start)))$'\n'
}

nvidia-smi topo -m
part "doctor" 60 python -m jax_twoshot doctor
part "selftest, a process a GPU ($ranks)" 120 python -m jax_twoshot selftest --ranks "$ranks"
part "selftest, one process, $devices GPUs" 90 python -m jax_twoshot selftest --devices "$devices"
rows=1,2,4,8,16,32,64
picture=()
python -c 'import matplotlib' 2> /dev/null && picture=(--plot "$out/bench.png")
part "bench, a process a GPU ($ranks)" 180 python -m jax_twoshot bench --ranks "$ranks" --rows $rows --width 4096,7168 \
  --repeats 10 --timeout 80 --json "$out/bench.json" "${picture[@]}"
part "bench, one process" 60 python -m jax_twoshot bench --devices "$devices" --rows 1,16,64 --repeats 10 \
  --json "$out/bench_one_process.json"
# XLA's own kernel for small messages, which it uses in one process; the flag holds for all of a process.
XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_unsupported_use_all_reduce_one_shot_kernel=true" \
  part "bench, one process, psum is XLA's one-shot kernel" 60 python -m jax_twoshot bench --devices "$devices" \
  --rows 1,16,64 --repeats 10 --json "$out/bench_xla_one_shot.json"

printf '\n=== parts\n%s' "$table"
exit "$failed"

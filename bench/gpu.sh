#!/usr/bin/env bash
# Runs everything that needs a GPU, from a plain checkout, with nothing installed or fetched, in under ten minutes:
# kernel, capture and overlap tests, kernel benchmarks, full-size training steps. Records go to bench/results/.
#   bench/gpu.sh [--parts tests,kernels,steps] [--budget 570] [--output DIR]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# .types/vlaforge holds links to the folders: the package without an installation. -P keeps the root off the path.
export PYTHONPATH="$root/.types${PYTHONPATH:+:$PYTHONPATH}"
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
cd "$(mktemp -d)"
exec "${PYTHON:-python3}" -P -m vlaforge.bench.cli gpu "$@"

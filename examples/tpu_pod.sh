#!/bin/bash
# A TPU pod slice by gcloud: v5e with 16 chips, four hosts, one process per host.
#
#   export PROJECT=... ZONE=us-west4-a BUCKET=gs://...
#   examples/tpu_pod.sh create     # the slice, with meshlayout on every host
#   examples/tpu_pod.sh run        # train; also after a preemption: it resumes
#   examples/tpu_pod.sh delete
#
# Every host runs the same command, and ml.initialize() asks the slice for the others.
set -euo pipefail

NAME=${NAME:-meshlayout}
ZONE=${ZONE:?the zone of the TPU, as us-west4-a}
PROJECT=${PROJECT:?the project that pays for it}
ACCELERATOR=${ACCELERATOR:-v5litepod-16}
VERSION=${VERSION:-v2-alpha-tpuv5-lite}
# The checkout to copy to the hosts.
SOURCE=${SOURCE:-$(cd "$(dirname "$0")/.." && pwd)}

where=(--zone "$ZONE" --project "$PROJECT")

on_every_host() {
  gcloud compute tpus tpu-vm ssh "$NAME" "${where[@]}" --worker=all --command "$1"
}

case "${1:-}" in
  create)
    gcloud compute tpus tpu-vm create "$NAME" "${where[@]}" \
      --accelerator-type "$ACCELERATOR" --version "$VERSION" --spot
    # Only what git knows: no environments, no caches.
    archive=$(mktemp -d)/meshlayout.tar.gz
    git -C "$SOURCE" archive --format=tar.gz --output="$archive" HEAD
    gcloud compute tpus tpu-vm scp "$archive" "$NAME": "${where[@]}" \
      --worker=all
    on_every_host "mkdir -p meshlayout && tar -xzf meshlayout.tar.gz -C meshlayout &&
      python3 -m venv venv && venv/bin/pip install --quiet './meshlayout[tpu,gcs]'"
    ;;
  run)
    shift
    # Status 75 means that the run was told to end, and has saved: it is started again,
    # as long as the slice is there.
    while true; do
      status=0
      on_every_host "cd meshlayout && ../venv/bin/python examples/train.py \
        --checkpoints ${BUCKET:?where to save, as gs://bucket}/$NAME $*" || status=$?
      [ "$status" -eq 75 ] || exit "$status"
    done
    ;;
  delete)
    gcloud compute tpus tpu-vm delete "$NAME" "${where[@]}" --quiet
    ;;
  *)
    sed -n '2,9s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac

#!/usr/bin/env bash
# One night: measure this machine, judge the night against the history, keep it if it is good.
#
# Exit status: 0 nothing got slower, 1 something did, 2 bad input, 3 cannot be told (the first eight nights, a noisy
# night, a point or a backend that is not what it was).
#
#   COMMBENCH  how to run commbench              (default: commbench)
#   SPEC       what to measure                   (default: the shipped sweep "nightly")
#   LAUNCHES   launches of a night, at least 8   (default: 8)
#   HISTORY    folder that keeps the nights      (default: ./history)
#   NIGHT      folder for this night's results   (default: ./reports/night-<time>)

set -euo pipefail

COMMBENCH=${COMMBENCH:-commbench}
SPEC=${SPEC:-nightly}
LAUNCHES=${LAUNCHES:-8}
HISTORY=${HISTORY:-$PWD/history}
NIGHT=${NIGHT:-$PWD/reports/night-$(date -u +%Y%m%d-%H%M%S)}

# A sweep exits 1 when points are wrong or failed. The gate names them, so the night goes on.
sweep=0
$COMMBENCH sweep "$SPEC" --launches "$LAUNCHES" --out "$NIGHT" --quiet || sweep=$?
if ((sweep > 1)); then exit "$sweep"; fi

outputs=(--out "$NIGHT/gate")
if [[ -n ${GITHUB_STEP_SUMMARY:-} ]]; then outputs+=(--markdown "$GITHUB_STEP_SUMMARY" --annotations); fi

gate=0
$COMMBENCH gate --baseline history --history "$HISTORY" --candidate "$NIGHT" --add "${outputs[@]}" || gate=$?
exit "$gate"

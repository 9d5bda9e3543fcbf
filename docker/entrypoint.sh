#!/bin/sh
# head [ray start options]            the first node of a cluster, which DPS_HEAD names (host:port) to the others
# worker [ray start options]          a further node
# health                              is this node well? for the image's health check
# anything else                       is run as it is: dps train …, ray job submit …, sh
set -eu

want_token() {
    if [ -z "${RAY_AUTH_TOKEN:-}" ] && [ ! -s "${RAY_AUTH_TOKEN_PATH:-}" ] && [ "${RAY_AUTH_MODE:-}" = token ]; then
        echo "no token: give all nodes the same file, and RAY_AUTH_TOKEN_PATH where it is" >&2
        exit 2
    fi
}

node() {
    exec ray start --block --disable-usage-stats "$@"
}

case "${1:-}" in
head)
    shift
    want_token
    # The dashboard and the job API are for other machines too: the token guards them.
    node --head --port=6379 --dashboard-host=0.0.0.0 --metrics-export-port=8080 "$@"
    ;;
worker)
    shift
    head=${DPS_HEAD:?is where the head is, such as head:6379}
    # Ray gives up after a few seconds, and containers start in any order.
    want_token  # without one no head ever answers
    until ray health-check --address "$head" >/dev/null 2>&1; do
        [ "${said:-}" ] || echo "waiting for the head at $head: not started yet, out of reach, or with another token" >&2
        said=yes
        sleep 2
    done
    node --address="$head" --metrics-export-port=8080 "$@"
    ;;
health)
    # Process 1 was called with `head` or `worker`, or this is no node.
    grep -qzxE 'head|worker' /proc/1/cmdline || exit 0
    wget -q -T 5 -O- http://127.0.0.1:52365/api/local_raylet_healthz | grep -q success
    ;;
*)
    exec "$@"
    ;;
esac

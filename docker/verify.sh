#!/bin/bash
# Builds the image on a bare Debian and uses it as a cluster would: no Docker engine, no GPU and, once it is built, no
# internet. As root. About twenty minutes on two cores and 35 GB of disk while it builds; at the end podman's dangling images
# are pruned, and the image removed unless `--keep` is given.
set -euo pipefail
cd "$(dirname "$0")/.."

keep=${1:-}
base=localhost/debian:bookworm
image=localhost/dps
here=$(mktemp -d)
network=dps-verify-$$
head=$network-head
worker=$network-worker

clean_up() {
    podman rm --force --time 5 --ignore "$head" "$worker" >/dev/null || true
    podman network rm --force "$network" >/dev/null 2>&1 || true
    rm -rf "$here"
    if [ "$keep" != --keep ]; then podman rmi --force "$image" "$base" >/dev/null 2>&1 || true; fi
    podman image prune --force >/dev/null || true  # the stages of the build
}
trap clean_up EXIT

step() { printf '\n== %s\n' "$*"; }
fail() { printf 'FAILED: %s\n' "$*" >&2; exit 1; }

# As strict as a cluster may be: a user without a name, nothing writable but /tmp and the run's folder, no capabilities.
# (The limits are those that every host grants; noexec on /tmp would keep Triton from what it compiled; podman alone would copy
# the image's /tmp/ray into the tmpfs, as a folder of root's.)
strict=(--runtime runc --user 12345:12345 --read-only --read-only-tmpfs=false --tmpfs "/tmp:exec,mode=1777,notmpcopyup"
    --cap-drop all --security-opt no-new-privileges --shm-size 1g --ulimit nofile=20000:20000 --ulimit nproc=4000:4000
    --volume "$here/workspace:/workspace")
inside() { podman run --rm --no-healthcheck --network none "${strict[@]}" "$image" "$@"; }

for tool in buildah podman runc debootstrap iptables; do  # without iptables podman makes no network
    command -v "$tool" >/dev/null || fail "$tool is missing: apt-get install buildah podman runc debootstrap iptables"
done
install -d -o 12345 -g 12345 "$here/workspace"

step "base: a minimal Debian"
podman image exists "$base" || {
    debootstrap --variant=minbase bookworm "$here/debian" >/dev/null
    tar -C "$here/debian" -c . | podman import --quiet - "$base"
}
podman image inspect --format '{{.Size}} bytes' "$base"

step "build"
SECONDS=0
# Behind a proxy that signs for others, pip needs its certificates; a secret leaves nothing in the image.
ca=${SSL_CERT_FILE:+--secret=id=ca,src=$SSL_CERT_FILE}
revision=$(git rev-parse HEAD)
nice buildah bud --quiet --format docker --layers --isolation chroot --network host ${ca:+"$ca"} \
    --build-arg BASE_IMAGE="$base" --build-arg DPS_REVISION="$revision" --tag "$image" --file docker/Dockerfile . \
    >"$here/build.log" 2>&1 || { tail -30 "$here/build.log" >&2; fail "the build"; }
podman image inspect --format "{{.Size}} bytes, built in $SECONDS s" "$image"

step "nothing in it that does not belong there"
[ "$(podman image inspect --format '{{.User}}' "$image")" = 10001:10001 ] || fail "its user"
[ "$(podman image inspect --format '{{index .Labels "org.opencontainers.image.revision"}}' "$image")" = "$revision" ] ||
    fail "its label"
# shellcheck disable=SC2016 # for the shell inside
inside sh -euc '
    for tool in gcc g++ cc c++ clang make cmake pkg-config pip git ld as; do
        if command -v $tool; then echo "a build tool is left"; exit 1; fi
    done
    if find / -xdev \( -name "*.beton" -o -name "id_rsa*" -o -name "id_ed*" -o -name "auth_token" -o -path "/run/secrets/*" \) 2>/dev/null \
        | grep .; then echo "what is that?"; exit 1; fi
    grep -q "^[^ ]* / [^ ]* ro," /proc/mounts || { echo "the root is not mounted read-only"; exit 1; }
    # /var/tmp is open to everybody: only the mount keeps it from being written.
    if touch /var/tmp/x 2>/dev/null; then echo "the root can be written"; exit 1; fi
    if find / -xdev -type d -writable ! -path /tmp ! -path /workspace 2>/dev/null | grep .; then
        echo "more than /tmp and /workspace can be written"; exit 1
    fi
    id; echo "no build tools, no secrets, read-only"'

step "Triton's driver binding needs no compiler"
inside python -c '
import pathlib, triton.backends.nvidia as nvidia
from triton.runtime.build import compile_so_from_file
source = pathlib.Path(nvidia.__file__).with_name("driver.c")
made = compile_so_from_file(str(source), "cuda_utils", libraries=["libcuda.so.1"])
assert b"PyInit_cuda_utils" in pathlib.Path(made).read_bytes()
print("handed out:", made)'

step "dps doctor"
inside dps doctor

step "the demo: one worker, no network"
# shellcheck disable=SC2016
inside bash -euo pipefail -c '
    dps prepare digits data/digits
    for method in baseline dps; do
        dps train digits-sym40 --set method.name=$method --workers 1 --out runs/demo --name $method | tail -n 4
    done
    dps report runs/demo/baseline runs/demo/dps'
grep -q "revision: $revision" "$here/workspace/runs/demo/dps/config.yaml" || fail "the run does not know its revision"

step "a cluster of two containers, with a token"
# Names are given by hand: which of podman's ways of serving them is installed differs from machine to machine.
podman network create --internal --subnet 10.79.0.0/24 "$network" >/dev/null
at=10.79.0.10
(umask 077 && head -c 32 /dev/urandom | base64 >"$here/token" && chown 12345 "$here/token")
strict+=(--network "$network" --add-host "$head:$at" --volume "$here/token:/run/secrets/token:ro" --env RAY_AUTH_TOKEN_PATH=/run/secrets/token)
one=(--num-cpus=1 --object-store-memory=200000000)
podman run --detach --name "$worker" --env DPS_HEAD="$head:6379" "${strict[@]}" "$image" worker "${one[@]}" \
    >/dev/null 2>"$here/podman.log"
podman run --detach --name "$head" --ip "$at" "${strict[@]}" "$image" head "${one[@]}" >/dev/null 2>>"$here/podman.log"
for node in "$head" "$worker"; do
    for _ in $(seq 60); do
        if podman healthcheck run "$node" >/dev/null 2>&1; then break; else sleep 2; fi
    done
    podman healthcheck run "$node" || { podman logs "$node" >&2; fail "$node is not well"; }
    echo "$node is well"
done
refused=$(podman exec "$worker" wget -q -S -O- "http://$head:8265/api/jobs/" 2>&1 || true)
grep -q '401 Unauthorized' <<<"$refused" || fail "the job API without a token: $refused"
echo "the job API answers 401 to who has no token"

step "a DPS run over both, as a job"
podman exec --env RAY_ADDRESS="http://$head:8265" "$head" ray job submit --log-style=record -- \
    dps train digits --name cluster --out /workspace/runs --set data.path=/workspace/data/digits --workers 2 \
    --set launch.placement=STRICT_SPREAD --set train.epochs=6 2>&1 | grep -E '^(run|epoch|cluster) |succeeded'
[ -s "$here/workspace/runs/cluster/summary.json" ] || fail "the run did not end"

step "the nodes are stopped: they end by themselves, the worker drains"
for node in "$worker" "$head"; do
    SECONDS=0
    podman stop --time 60 "$node" >/dev/null 2>&1
    [ "$(podman inspect --format '{{.State.ExitCode}}' "$node")" != 137 ] || fail "$node had to be killed"
    # The head is not asked: when its work is done it may be gone before it says so.
    [ "$node" = "$head" ] || podman logs "$node" 2>&1 | grep -o 'Local node finished draining' || fail "$node did not drain"
    echo "$node ended in $SECONDS s"
done

step "all passed"
cat <<'END'
Not checked, for want of a GPU and of NVIDIA's images: the default base (nvidia/cuda on Ubuntu), CUDA, NCCL between nodes,
Triton's binding at work, NVIDIA's container toolkit. Nor compose, which wants a Docker engine.
END

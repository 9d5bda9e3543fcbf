#!/bin/bash
# Runs dps.sbatch on a Slurm of two nodes, each with its own network, host name, processes and /tmp, on this machine: a job
# that runs through, one that is told that its time is nearly up, one whose node loses power. As root, with slurm-wlm, munge,
# iproute2 and `dps` installed (.venv of `make setup` is taken if it is there). About ten minutes.
set -euo pipefail
cd "$(dirname "$0")/../.."
repository=$PWD
export PATH=$repository/.venv/bin:$PATH PYTHONPATH=$repository

here=$(mktemp -d -p /var/tmp dps-slurm-XXXX)  # the shared disk: a node has its own /tmp
nodes=("dps$$a" "dps$$b")
addresses=(10.78.0.1 10.78.0.2)  # seen by the two nodes only
declare -A daemons=()
export SLURM_CONF=$here/slurm.conf HOME=$here RAY_worker_niceness=0  # or a busy machine starves them

step() { printf '\n== %s\n' "$*"; }
fail() {
    printf 'FAILED: %s\n' "$*" >&2
    tail -n 20 "$here"/*.log >&2
    exit 1
}
on() { ip netns exec "$@"; }

clean_up() {
    # Each is the first process of its node: all others of the node go with it.
    for pid in "${daemons[@]}"; do kill -KILL "$pid" 2>/dev/null || true; done
    wait 2>/dev/null || true
    for node in "${nodes[@]}"; do ip netns delete "$node" 2>/dev/null || true; done
    rm -rf "$here"
}
trap clean_up EXIT

# power_on NODE: its slurmd, in namespaces that end with it.
power_on() {
    ip netns exec "$1" unshare --uts --mount --pid --fork --kill-child --mount-proc bash -c "
        hostname $1; mount -t tmpfs tmpfs /tmp; exec slurmd -D -N $1" >>"$here/$1.log" 2>&1 &
    daemons[$1]=$!
}
power_off() { kill -KILL "${daemons[$1]}"; wait "${daemons[$1]}" 2>/dev/null || true; }

submit() { on "${nodes[0]}" env DPS_OUT="$here/runs" DPS_NAME="$1" sbatch --parsable --output="$here/$1.log" "${@:2}"; }
state() { on "${nodes[0]}" scontrol show job "$1" | grep -oP 'JobState=\K\w+'; }
# A busy machine is no failure: five minutes for anything.
until_state() {
    for _ in $(seq 300); do
        if [ "$(state "$1")" = "$2" ]; then return; fi
        sleep 1
    done
    fail "job $1 is $(state "$1") and not $2"
}
until_epoch() {
    for _ in $(seq 600); do
        if grep -q "^epoch $2/" "$here/$1.log" 2>/dev/null; then return; fi
        sleep 0.5
    done
    fail "$1 does not come to epoch $2"
}
# Each epoch once, on both nodes; nothing is left of the token and of Ray's files.
check() {
    python - "$here/runs/$1" "$2" <<'PYTHON' || fail "$1 is not whole"
import json, pathlib, sys
run, epochs = pathlib.Path(sys.argv[1]), int(sys.argv[2])
rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
assert [row["epoch"] for row in rows] == list(range(1, epochs + 1)), [row["epoch"] for row in rows]
print(f"{run.name}: epochs 1 to {epochs}, each once; accuracy {json.loads((run / 'summary.json').read_text())['accuracy']:.1%}")
PYTHON
    grep -hE '^(run |restarted|job )|finished' "$here/$1.log"
    if compgen -G "$here/.dps-*" >/dev/null; then fail "a token is left"; fi
    for node in "${nodes[@]}"; do
        if ls -d "/proc/${daemons[$node]}/root/tmp/dps-"* 2>/dev/null; then fail "Ray's files are left on $node"; fi
    done
}

for tool in ip slurmctld slurmd munged dps ray; do
    command -v "$tool" >/dev/null || fail "$tool is missing: apt-get install slurm-wlm munge iproute2; make setup"
done

step "two nodes, one cable, Slurm $(slurmctld -V | cut -d' ' -f2)"
for node in "${nodes[@]}"; do ip netns add "$node"; done
ip -n "${nodes[0]}" link add eth0 type veth peer eth0 netns "${nodes[1]}"
for k in 0 1; do
    ip -n "${nodes[k]}" address add "${addresses[k]}/24" dev eth0
    ip -n "${nodes[k]}" link set eth0 up
    ip -n "${nodes[k]}" link set lo up
done
head -c 128 /dev/urandom >"$here/munge.key"
chmod 600 "$here/munge.key"
munged --foreground --force --key-file="$here/munge.key" --socket="$here/munge" --pid-file="$here/munge.pid" \
    --seed-file="$here/munge.seed" >/dev/null 2>&1 &
daemons[munge]=$!
cat >"$SLURM_CONF" <<CONF
ClusterName=verify
SlurmctldHost=${nodes[0]}(${addresses[0]})
AuthInfo=socket=$here/munge
SlurmUser=root
StateSaveLocation=$here/state
SlurmctldPidFile=$here/slurmctld.pid
SlurmdPidFile=$here/slurmd-%n.pid
SlurmdSpoolDir=$here/spool-%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
JobRequeue=1
SlurmdTimeout=10
KillWait=15
NodeName=${nodes[0]} NodeAddr=${addresses[0]} CPUs=1
NodeName=${nodes[1]} NodeAddr=${addresses[1]} CPUs=1
PartitionName=all Nodes=ALL Default=YES State=UP
CONF
echo CgroupPlugin=cgroup/v1 >"$here/cgroup.conf"  # not used, and asks for nothing
mkdir "$here/state"
chmod 711 "$here"
ip netns exec "${nodes[0]}" unshare --uts --pid --fork --kill-child --mount-proc bash -c "
    hostname ${nodes[0]}; exec slurmctld -D" >"$here/slurmctld.log" 2>&1 &
daemons[slurmctld]=$!
for node in "${nodes[@]}"; do power_on "$node"; done
for _ in $(seq 30); do
    if on "${nodes[0]}" sinfo --noheader --format %D%t 2>/dev/null | grep -qx 2idle; then break; fi
    sleep 1
done
on "${nodes[0]}" sinfo | grep ' 2 *idle ' || fail "Slurm does not start"

dps prepare digits "$here/digits"
job=("$repository/deploy/slurm/dps.sbatch" digits --workers 2 --set launch.placement=STRICT_SPREAD
    --set "data.path=$here/digits" --set launch.timeout_s=30)

step "a job"
id=$(submit through "${job[@]}" --set train.epochs=4)
until_epoch through 1
[ "$(stat -c %a "$here/.dps-$id.token")" = 600 ] || fail "the token can be read by others"
until_state "$id" COMPLETED
check through 4

step "a job whose time is nearly up"
id=$(submit warned "${job[@]}" --set train.epochs=30)
until_epoch warned 5
on "${nodes[0]}" scancel --batch --signal=USR1 "$id"
until_state "$id" PENDING
echo "requeued"
on "${nodes[0]}" scontrol update JobId="$id" StartTime=now  # Slurm lets a requeued job wait two minutes
until_state "$id" COMPLETED
check warned 30

step "a job whose second node loses power"
id=$(submit broken "${job[@]}" --set train.epochs=30)
until_epoch broken 5
power_off "${nodes[1]}"
until_state "$id" PENDING
echo "requeued"
power_on "${nodes[1]}"
on "${nodes[0]}" scontrol update JobId="$id" StartTime=now
until_state "$id" COMPLETED
check broken 30

step "a job that was cancelled, submitted again"
id=$(submit again "${job[@]}" --set train.epochs=20)
until_epoch again 5
on "${nodes[0]}" scancel "$id"
until_state "$id" CANCELLED
id=$(submit again "${job[@]}" --set train.epochs=20)
until_state "$id" COMPLETED
check again 20

step "all passed"
echo "Not checked: GPUs (gres), cgroups, other versions of Slurm."

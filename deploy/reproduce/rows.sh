# shellcheck shell=bash
# From a data set's files to the report of its rows: the part that the scripts beside this one share. Each sets its defaults, then
# sources this. Run again after whatever happened it does what is missing.
set -euo pipefail

: "${dataset:?}" "${source:?}" "${holds:?}" "${contents:?}" "${models:?}" "${rows:?}" "${workers:?}" "${prepare=}" "${data:?}" "${runs:?}"
images="" address="" seeds="0 1 2" gpus=1 dry=""
settings=()
script=$(basename "$0")

usage() {
    cat <<TEXT
$script --images DIR [options]      $contents → a report of runs, beside the paper's figures

  --images DIR      where $contents are
  --data DIR        where the .beton files are, or go                [$data]
  --runs DIR        where the runs' folders go; all nodes see it     [$runs]
  --address URL     a Ray cluster's jobs, such as http://127.0.0.1:8265; without it \`dps train\` runs from here
  --workers N|A:B   worker processes, fixed or elastic               [$workers]
  --models "…"      the recipes are $dataset-MODEL-ROW               [$models]
  --rows "…"        parts of the recipes; kd learns from the runs of baseline, which stands before it
                    [$rows]
  --seeds "…"       a run each                                       [$seeds]
  --gpus N          GPUs of an evaluation, as a job of --address     [$gpus]
  --set a.b=c       a field of every recipe; may be repeated
  --prepare "…"     further options of \`dps prepare\`                 [$prepare]
  --dry-run         print every command and run none
TEXT
}

refuse() {
    echo "$script: $1" >&2
    exit 2
}

while [ $# -gt 0 ]; do
    case $1 in
        --dry-run) dry=1 && shift && continue ;;
        -h | --help) usage && exit 0 ;;
    esac
    [ $# -gt 1 ] || refuse "$1 needs a value: --help shows the options"
    case $1 in
        --images) images=$2 ;;
        --data) data=$2 ;;
        --runs) runs=$2 ;;
        --address) address=$2 ;;
        --workers) workers=$2 ;;
        --models) models=$2 ;;
        --rows) rows=$2 ;;
        --seeds) seeds=$2 ;;
        --gpus) gpus=$2 ;;
        --set) settings+=(--set "$2") ;;
        --prepare) prepare=$2 ;;
        *) refuse "$1 is not an option: --help shows them" ;;
    esac
    shift 2
done
[ -n "$images" ] || refuse "--images is missing: give the folder with $contents"
case $data$runs in
    *://*) refuse "--data is $data and --runs is $runs: give folders that this machine and all nodes see" ;;
esac
# A job runs in another folder
data=$(realpath -m "$data") runs=$(realpath -m "$runs")
[ -n "$dry" ] || [ -e "$images/$holds" ] || refuse "--images is $images: it holds no $holds"
read -ra models <<< "$models"
read -ra rows <<< "$rows"
read -ra seeds <<< "$seeds"
read -ra prepare <<< "$prepare"

run() {
    printf '+'
    printf ' %q' "$@"
    printf '\n'
    [ -n "$dry" ] || "$@"
}

# job NAME GPUS COMMAND...: on the cluster, if there is one
job() {
    local id
    id=$1-$(date +%s)
    if [ -z "$address" ]; then
        run "${@:3}"
        return
    fi
    run ray job submit --address "$address" --submission-id "$id" --entrypoint-num-gpus "$2" -- "${@:3}"
    [ -z "$dry" ] || return 0
    # A job that somebody stopped ends with 0 too
    case $(ray job status --address "$address" "$id" 2>&1) in
        *"Job '$id' succeeded"*) ;;
        *)
            echo "$script: job $id did not succeed: its log says why; run this again to go on" >&2
            exit 1
            ;;
    esac
}

# train NAME RECIPE SETTING...: begins, goes on, or is done
train() {
    local name=$1 recipe=$2
    shift 2
    if [ -z "$dry" ] && [ -e "$runs/$name/summary.json" ]; then
        echo "$runs/$name is finished"
    elif [ -z "$dry" ] && [ -e "$runs/$name/config.yaml" ]; then
        job "$name" 0 dps train --name "$name" --out "$runs" --workers "$workers" --resume
    else
        job "$name" 0 dps train "$recipe" --name "$name" --out "$runs" --workers "$workers" \
            --set "data.path=$data" "${settings[@]}" "$@"
    fi
}

run dps prepare "$source" "$data" --from "$images" "${prepare[@]}"

everything=()
for model in "${models[@]}"; do
    for row in "${rows[@]}"; do
        recipe=$dataset-$model-$row
        teaching=()
        if [ "$row" = kd ]; then
            teachers=$(printf ',%s' "${seeds[@]/#/$runs/$dataset-$model-baseline-}")
            teaching=(--set "method.teachers=[${teachers#,}]")
        fi
        folders=()
        for seed in "${seeds[@]}"; do
            train "$recipe-$seed" "$recipe" --set "train.seed=$seed" "${teaching[@]}"
            folders+=("$runs/$recipe-$seed")
        done
        # Of several runs also mean, deviation and the ensemble
        job "$recipe-evaluate" "$gpus" dps evaluate "${folders[@]}" --out "$runs/$recipe.json"
        everything+=("${folders[@]}")
    done
done
run dps report "${everything[@]}" --out "$runs/report.html"

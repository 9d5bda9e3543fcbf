#!/usr/bin/env bash
# The lightweight methods on 1,500 images of CIFAR-10, clean and with 40% of the labels redrawn, on two CPUs: docs/results has what came of it.
# shellcheck disable=SC1091,SC2034  # rows.sh reads these
dataset=cifar10 source=cifar10 holds=test_batch.bin data=data/cifar10-1500 runs=runs/cifar10-1500 \
    contents="data_batch_*.bin and test_batch.bin"
models=wrn10_2 workers=2 prepare="--train-images 1500"
rows="baseline te dlb pskd ls sl dps baseline-sym40 te-sym40 dlb-sym40 pskd-sym40 ls-sym40 sl-sym40 dps-sym40"
. "$(dirname "$0")/rows.sh"

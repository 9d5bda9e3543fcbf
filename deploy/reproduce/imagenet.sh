#!/usr/bin/env bash
# The paper's ImageNet rows. The mixed ones: --rows "baseline-cutout dlb-cutout dps-cutout baseline-cutmix dlb-cutmix dps-cutmix"
# shellcheck disable=SC1091,SC2034  # rows.sh reads these
dataset=imagenet source=imagefolder holds=train data=data/imagenet runs=runs/imagenet contents="train/<class>/* and val/<class>/*"
models="resnet152 densenet264" rows="baseline te dlb pskd dps kd" workers=8 prepare=""
. "$(dirname "$0")/rows.sh"

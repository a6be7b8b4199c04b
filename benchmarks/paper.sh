#!/bin/sh
# The paper's experiments at full size, for a machine with a GPU; they take hours to days. In an empty folder:
#
#   sh …/benchmarks/paper.sh cub                # figures 5e, 6d; cars: 5d, 6c; cifar100: 5f, 6b; cifar10: 5b, 6a
#   sh …/benchmarks/paper.sh imagenet           # figure 5c
#   sh …/benchmarks/paper.sh actual             # figure 9e: along the checkpoints of the fine-tuning
#   sh …/benchmarks/paper.sh --dry-run cub      # fine-tune, and only plan the ports
#
# Finished work is kept. The recipes (recipes/) hold the paper's settings: T, B, B', epochs, rates.
# Fine-tunings start from a zero head on both sides; the paper uses one random head.
set -eu

dry=
if [ "${1:-}" = --dry-run ]; then
    dry=--dry-run
    shift
fi
benchmarks=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
export PYTHONPATH="$benchmarks${PYTHONPATH:+:$PYTHONPATH}"

tune() { # folder, model, options …
    folder=$1
    shift
    [ -d "$folder" ] || hf-retarget finetune "$@" --out "$folder"
}

transfer() { # folder, options …
    folder=$1
    shift
    [ -d "$folder" ] || hf-retarget port "$@" --out "$folder" $dry
}

# Fine-tunings of two ResNet-18 pre-trained independently on ImageNet: T = 15, 5 × 128 images per gradient.
pretrained() { # recipe
    old=timm/resnet18.tv_in1k new=timm/resnet18.a1_in1k
    tune "$1/tuned" $old --data "$1@source"
    tune "$1/direct" $new --data "$1@source"
    for method in naive gmt fgmt fgmt-sign oracle; do
        transfer "$1/$method" --src-base $old --src-ft "$1/tuned" --new-base $new --tuned-target "$1/direct" \
            --data "$1@paper" --head zero --method $method
    done
}

# The same along actual checkpoints: 43 steps are about one epoch of CUB.
actual() {
    old=timm/resnet18.tv_in1k
    tune cub/recorded $old --data cub@source --record 43
    transfer cub/actual --src-base $old --src-ft cub/recorded --new-base timm/resnet18.a1_in1k \
        --checkpoints cub/recorded/trajectory --data cub@paper --head zero
}

# From one random initialisation to another: T = 40, 100 × 128 images per gradient.
imagenet() {
    mkdir -p imagenet
    for seed in 0 1; do
        [ -d imagenet/$seed ] || python -c "
import timm, torch
from hf_retarget.models import load_checkpoint, save_model

torch.manual_seed($seed)
random = load_checkpoint(timm.create_model('resnet18'))
save_model('imagenet/$seed', random.weights, random)"
    done
    tune imagenet/tuned imagenet/0 --data imagenet@source --head keep
    transfer imagenet/fgmt --src-base imagenet/0 --src-ft imagenet/tuned --new-base imagenet/1 --data imagenet@paper
}

# Conv8 at full width, from random weights to CIFAR-10 (T = 30), and from there to ten classes of CIFAR-100 (T = 15).
conv8=quality.networks:Conv8

random_conv8() { # seed
    mkdir -p conv8
    [ -e "conv8/random-$1.safetensors" ] || python -c "
import torch
from quality.networks import Conv8
from hf_retarget.files import save_tensors

torch.manual_seed($1)
save_tensors('conv8/random-$1.safetensors', Conv8().state_dict(), {})"
}

trained_conv8() { # seed
    random_conv8 "$1"
    tune "conv8/cifar10-$1" "conv8/random-$1.safetensors" --arch $conv8 --data cifar10@source --head keep --seed "$1"
}

cifar10() {
    trained_conv8 0
    random_conv8 1
    transfer conv8/cifar10-fgmt --arch $conv8 --data cifar10@paper \
        --src-base conv8/random-0.safetensors --src-ft conv8/cifar10-0 --new-base conv8/random-1.safetensors
}

cifar100() {
    trained_conv8 0
    trained_conv8 1
    tune conv8/cifar100-tuned conv8/cifar10-0 --arch $conv8 --data cifar100@source
    transfer conv8/cifar100-fgmt --arch $conv8 --src-base conv8/cifar10-0 --src-ft conv8/cifar100-tuned \
        --new-base conv8/cifar10-1 --data cifar100@paper --head zero
}

[ $# -gt 0 ] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 1; }
for what; do
    case $what in
        cars | cub) pretrained "$what" ;;
        actual | imagenet | cifar10 | cifar100) $what ;;
        *) echo "there is no experiment '$what'; choose among cars, cub, actual, imagenet, cifar10, cifar100" >&2; exit 1 ;;
    esac
done

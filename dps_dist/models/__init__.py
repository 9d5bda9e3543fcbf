"""The models: one table, name → builder, and `build`, which the training loop calls.

A new model is one file with a `Classifier` and one row here; the shared tests find it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torchvision.models as tv
from torchvision.models.resnet import BasicBlock, Bottleneck

from dps_dist.errors import InputError
from dps_dist.models.base import Classifier, Stem
from dps_dist.models.densenet import DenseNet
from dps_dist.models.preact_resnet import PreActResNet
from dps_dist.models.resnet import ResNet
from dps_dist.models.small_cnn import SmallCNN
from dps_dist.models.vit import ViTB16
from dps_dist.models.weights import load_weights
from dps_dist.models.wide_resnet import WideResNet

__all__ = ["MODELS", "Classifier", "Options", "Row", "Stem", "build", "load_weights"]

SMALLEST_IMAGE = 8


@dataclass(frozen=True)
class Options:
    """What a builder is told. `stem` is one of its row's, `image_size` None where unknown."""

    num_classes: int
    stem: Stem | None
    image_size: int | None


@dataclass(frozen=True)
class Row:
    """A model of the table."""

    builder: Callable[[Options], Classifier]
    stems: tuple[Stem, ...] = ()
    """The stems it can have; the first is its own."""
    published: Any = None
    """torchvision's enum of weights."""
    torchvision: str = ""
    """How torchvision makes it, of {classes} and {side}, where not by its name and {classes}."""
    stem_layers: tuple[str, str] = ("conv1", "maxpool")
    """What torchvision calls the convolution and the pool that a 3x3 stem replaces."""


EITHER: tuple[Stem, ...] = ("7x7", "3x3")
SMALL: tuple[Stem, ...] = ("3x3",)
OF_DENSENET = ("features.conv0", "features.pool0")

MODELS: dict[str, Row] = {
    "small_cnn": Row(lambda o: SmallCNN(o.num_classes), SMALL),
    "resnet18": Row(
        lambda o: ResNet(BasicBlock, (2, 2, 2, 2), o.num_classes, o.stem),
        EITHER,
        tv.ResNet18_Weights,
    ),
    "resnet50": Row(
        lambda o: ResNet(Bottleneck, (3, 4, 6, 3), o.num_classes, o.stem),
        EITHER,
        tv.ResNet50_Weights,
    ),
    "resnet101": Row(
        lambda o: ResNet(Bottleneck, (3, 4, 23, 3), o.num_classes, o.stem),
        EITHER,
        tv.ResNet101_Weights,
    ),
    "resnet152": Row(
        lambda o: ResNet(Bottleneck, (3, 8, 36, 3), o.num_classes, o.stem),
        EITHER,
        tv.ResNet152_Weights,
    ),
    "densenet121": Row(
        lambda o: DenseNet((6, 12, 24, 16), o.num_classes, o.stem, o.image_size),
        EITHER,
        tv.DenseNet121_Weights,
        stem_layers=OF_DENSENET,
    ),
    "densenet169": Row(
        lambda o: DenseNet((6, 12, 32, 32), o.num_classes, o.stem, o.image_size),
        EITHER,
        tv.DenseNet169_Weights,
        stem_layers=OF_DENSENET,
    ),
    "densenet201": Row(
        lambda o: DenseNet((6, 12, 48, 32), o.num_classes, o.stem, o.image_size),
        EITHER,
        tv.DenseNet201_Weights,
        stem_layers=OF_DENSENET,
    ),
    "densenet264": Row(
        lambda o: DenseNet((6, 12, 64, 48), o.num_classes, o.stem, o.image_size),
        EITHER,
        torchvision="DenseNet(32, (6, 12, 64, 48), 64, num_classes={classes})",
        stem_layers=OF_DENSENET,
    ),
    "vit_b_16": Row(
        lambda o: ViTB16(o.num_classes, o.image_size),
        published=tv.ViT_B_16_Weights,
        torchvision="vit_b_16(num_classes={classes}, image_size={side})",
    ),
    "preact_resnet18": Row(
        lambda o: PreActResNet((2, 2, 2, 2), (64, 128, 256, 512), o.num_classes, stem_width=64),
        SMALL,
    ),
    "wide_resnet10_2": Row(lambda o: WideResNet(10, 2, o.num_classes), SMALL),
    "wide_resnet40_1": Row(lambda o: WideResNet(40, 1, o.num_classes), SMALL),
}


def build(
    name: str,
    num_classes: int,
    *,
    stem: Stem | None = None,
    weights: str | Path | None = None,
    image_size: int | None = None,
) -> Classifier:
    """The model `name` for `num_classes` classes, freshly initialised or with `weights`.

    What is refused is named as the configuration has it: data.resolution is the image_size.

    stem: "7x7" (stride 2, max-pool; ImageNet) or "3x3" (stride 1, no pool); None takes the model's
    own. weights: torchvision's name for published ones, e.g. "IMAGENET1K_V1", or the path of a
    state dict. image_size: the side of the square images, which shapes ViT (224 if None) and is
    checked against what the others need.
    """
    row = _find(name)
    if num_classes < 2:
        raise InputError(f"num_classes is {num_classes}: give data of at least 2 classes")
    if image_size is not None and image_size < SMALLEST_IMAGE:
        raise InputError(f"data.resolution is {image_size}: give at least {SMALLEST_IMAGE}")
    if stem is None and row.stems:
        stem = row.stems[0]
    elif stem is not None and stem not in row.stems:
        can = f"give {' or '.join(row.stems)}, or " if row.stems else ""
        raise InputError(f"model.stem is {stem}: {name} has no such stem; {can}leave it out")
    model = row.builder(Options(num_classes, stem, image_size))
    if weights is not None:
        load_weights(model, weights, row.published)
    return model


def _find(name: str) -> Row:
    if name in MODELS:
        return MODELS[name]
    close = get_close_matches(name.lower(), MODELS, n=1)
    hint = f" ({close[0]} is the closest)" if close else ""
    raise InputError(f"model.name is {name}: give one of {', '.join(MODELS)}{hint}")

"""torchvision's DenseNet with a choice of stem; its state dict stays torchvision's.

DenseNet-264, which torchvision lacks, is the same class with blocks (6, 12, 64, 48).
"""

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import densenet

from dps_dist.errors import InputError
from dps_dist.models.base import Classifier, Stem

# Below these the third transition has nothing left to pool.
SMALLEST_IMAGE: dict[Stem, int] = {"7x7": 29, "3x3": 8}

# The published checkpoints predate the rule that a module's name has no dot: "norm.1" is "norm1".
_OLD_KEY = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)")


class DenseNet(Classifier, densenet.DenseNet):  # type: ignore[misc]  # torchvision ships no types
    """Huang et al. 2017 (BC, growth 32, 64 initial features)."""

    head_name = "classifier"
    features: nn.Sequential

    def __init__(
        self,
        blocks: Sequence[int],
        num_classes: int,
        stem: Stem | None = "7x7",
        image_size: int | None = None,
    ) -> None:
        smallest = SMALLEST_IMAGE[stem or "7x7"]
        if image_size is not None and image_size < smallest:
            raise InputError(
                f"data.resolution is {image_size}: DenseNet with the {stem} stem needs at least "
                f"{smallest}; give more, model.stem=3x3 or another model.name"
            )
        super().__init__(block_config=tuple(blocks), num_classes=num_classes)
        if stem == "3x3":
            conv = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
            # As torchvision initialises the convolution that this one replaces.
            nn.init.kaiming_normal_(conv.weight)
            self.features.conv0 = conv
            self.features.pool0 = nn.Identity()

    def embed(self, x: Tensor) -> Tensor:
        x = F.relu(self.features(x), inplace=True)
        return torch.flatten(F.adaptive_avg_pool2d(x, (1, 1)), 1)

    def adapt(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {_OLD_KEY.sub(r"\1\2", key): value for key, value in state.items()}

"""torchvision's ResNet with a choice of stem; its state dict stays torchvision's."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchvision.models import resnet

from dps_dist.models.base import Classifier, Stem


class ResNet(Classifier, resnet.ResNet):  # type: ignore[misc]  # torchvision ships no types
    """He et al. 2016, features [B, 512] (basic blocks) or [B, 2048] (bottlenecks)."""

    head_name = "fc"
    # torchvision's layers; `relu` and `avgpool` have no parameters.
    bn1: nn.Module
    relu: nn.Module
    layer1: nn.Module
    layer2: nn.Module
    layer3: nn.Module
    layer4: nn.Module
    avgpool: nn.Module

    def __init__(
        self,
        block: type[nn.Module],
        blocks: Sequence[int],
        num_classes: int,
        stem: Stem | None = "7x7",
    ) -> None:
        super().__init__(block, list(blocks), num_classes=num_classes)
        if stem == "3x3":
            self.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
            # As torchvision initialises the convolution that this one replaces.
            nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
            self.maxpool: nn.Module = nn.Identity()

    def embed(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return torch.flatten(self.avgpool(x), 1)

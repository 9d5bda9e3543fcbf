"""Pre-activation ResNets for small images: PreAct ResNet-18, and the body of the wide ResNets.

torchvision has neither. One class serves both, since they differ only in depth and widths.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dps_dist.models.base import Classifier, he_normal_convolutions


def _conv3x3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)


class PreActBlock(nn.Module):
    """x + conv(relu(bn(conv(relu(bn(x)))))), with a 1×1 projection of relu(bn(x)) for x where
    the width changes (He et al. 2016, "Identity mappings in deep residual networks")."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = _conv3x3(inputs, outputs, stride)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = _conv3x3(outputs, outputs)
        self.shortcut = (
            None
            if inputs == outputs and stride == 1
            else nn.Conv2d(inputs, outputs, kernel_size=1, stride=stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        activated = F.relu(self.bn1(x))
        residual = self.conv2(F.relu(self.bn2(self.conv1(activated))))
        identity = x if self.shortcut is None else self.shortcut(activated)
        return cast(Tensor, identity + residual)


class PreActResNet(Classifier):
    """A 3×3 convolution, one stage per width (each but the first halves the resolution), and the
    closing BatchNorm and ReLU of He et al., which much copied CIFAR code leaves out."""

    head_name = "fc"

    def __init__(
        self, blocks: Sequence[int], widths: Sequence[int], num_classes: int, *, stem_width: int
    ) -> None:
        super().__init__()
        self.conv1 = _conv3x3(3, stem_width)
        self.stages = nn.Sequential()
        inputs = stem_width
        for stage, (depth, width) in enumerate(zip(blocks, widths, strict=True)):
            strides = [1 if stage == 0 else 2] + [1] * (depth - 1)
            layers = nn.Sequential()
            for stride in strides:
                layers.append(PreActBlock(inputs, width, stride))
                inputs = width
            self.stages.append(layers)
        self.bn = nn.BatchNorm2d(inputs)
        self.fc = nn.Linear(inputs, num_classes)
        he_normal_convolutions(self)

    def embed(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.stages(self.conv1(x))))
        return torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)

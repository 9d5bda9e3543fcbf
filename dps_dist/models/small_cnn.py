"""A three-layer network that a laptop trains in seconds: 8×8 digits up to 32×32 images."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dps_dist.models.base import Classifier, he_normal_convolutions


def _layer(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class SmallCNN(Classifier):
    """Convolutions of width 32, 64, 128, halved in between; features [B, 128]."""

    head_name = "fc"

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _layer(3, 32), nn.MaxPool2d(2), _layer(32, 64), nn.MaxPool2d(2), _layer(64, 128)
        )
        self.fc = nn.Linear(128, num_classes)
        he_normal_convolutions(self)

    def embed(self, x: Tensor) -> Tensor:
        return torch.flatten(F.adaptive_avg_pool2d(self.body(x), 1), 1)

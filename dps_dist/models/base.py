"""What every model of the table is: a `Classifier`, whose logits are `head(embed(x))`.

The training loop calls the model; evaluation also asks for the penultimate features, without hooks.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal, cast

from torch import Tensor, nn

Stem = Literal["7x7", "3x3"]


class Classifier(nn.Module, ABC):
    """images [B, 3, H, W] → logits [B, K] by way of features [B, D].

    It comes first among a model's bases, so that this forward wins over torchvision's.
    """

    head_name: ClassVar[str]
    """Where the last linear layer is in the state dict: torchvision's name where there is one."""

    @abstractmethod
    def embed(self, x: Tensor) -> Tensor:
        """The penultimate features [B, D] of images [B, 3, H, W]."""

    @property
    def head(self) -> nn.Linear:
        """The last linear layer, D → K."""
        return cast(nn.Linear, self.get_submodule(self.head_name))

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, K] = head(embed(x))."""
        return cast(Tensor, self.head(self.embed(x)))

    def adapt(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Bring a state dict saved by an older or differently sized twin into this one's form."""
        return state


def he_normal_convolutions(model: nn.Module) -> None:
    """W ~ N(0, 2 / fan_out) for every convolution, as in He et al. 2015."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

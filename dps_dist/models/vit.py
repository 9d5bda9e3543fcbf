"""torchvision's ViT-B/16 for images of any multiple of 16; its state dict stays torchvision's."""

import math

import torch
from torch import Tensor, nn
from torchvision.models import vision_transformer

from dps_dist.errors import InputError
from dps_dist.models.base import Classifier

PATCH = 16
_POSITIONS = "encoder.pos_embedding"


class ViTB16(Classifier, vision_transformer.VisionTransformer):  # type: ignore[misc]  # no types
    """Dosovitskiy et al. 2021; the features [B, 768] are the class token after the last norm."""

    head_name = "heads.head"
    class_token: Tensor
    encoder: nn.Module
    image_size: int

    def __init__(self, num_classes: int, image_size: int | None = None) -> None:
        image_size = image_size or 224
        if image_size % PATCH:
            raise InputError(
                f"data.resolution is {image_size}: vit_b_16 cuts images into {PATCH}×{PATCH} "
                f"patches; give a multiple of {PATCH}"
            )
        super().__init__(
            image_size=image_size,
            patch_size=PATCH,
            num_layers=12,
            num_heads=12,
            hidden_dim=768,
            mlp_dim=3072,
            num_classes=num_classes,
        )

    def embed(self, x: Tensor) -> Tensor:
        patches: Tensor = super()._process_input(x)
        token = self.class_token.expand(patches.shape[0], -1, -1)
        encoded: Tensor = self.encoder(torch.cat([token, patches], dim=1))
        return encoded[:, 0]

    def adapt(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Interpolate the position embeddings [1, 1 + patches, 768] of another image size."""
        positions = state.get(_POSITIONS)
        if positions is None or positions.ndim != 3 or not _is_square(positions.shape[1] - 1):
            return state  # the comparison of keys and shapes will say what is wrong
        adapted: dict[str, Tensor] = vision_transformer.interpolate_embeddings(
            self.image_size, PATCH, dict(state)
        )
        return adapted


def _is_square(n: int) -> bool:
    return n > 0 and math.isqrt(n) ** 2 == n

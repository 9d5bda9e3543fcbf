"""Wide ResNets (Zagoruyko & Komodakis 2016): WRN-depth-k, a PreAct ResNet of three stages."""

from dps_dist.models.preact_resnet import PreActResNet


class WideResNet(PreActResNet):
    """Three stages of n = (depth − 4) / 6 blocks, widths 16k, 32k, 64k after a stem of 16."""

    def __init__(self, depth: int, k: int, num_classes: int) -> None:
        n, rest = divmod(depth - 4, 6)
        assert rest == 0, f"a wide ResNet has depth 6n + 4, not {depth}"
        widths = (16 * k, 32 * k, 64 * k)
        super().__init__((n, n, n), widths, num_classes, stem_width=16)

"""A run's configuration: typed, validated, and refused in one sentence when it is wrong.

Each section is described field by field; `recipes/` fills it from YAML and `--set`.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Pixels = Annotated[int, Field(ge=1, le=8192)]
Fraction = Annotated[FiniteFloat, Field(ge=0, le=1)]
Channels = tuple[FiniteFloat, FiniteFloat, FiniteFloat]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Noise(Section):
    """Label noise, applied when the labels are read; the data on disk stays clean."""

    kind: Literal["none", "symmetric", "asymmetric"] = Field(
        "none", description="redraw labels uniformly (symmetric) or by `mapping` (asymmetric)"
    )
    rate: Fraction = Field(0.0, description="share of the labels that is redrawn")
    seed: Count = Field(0, description="which labels are hit, apart from train.seed")
    mapping: dict[int, int] | None = Field(
        None, description="asymmetric: class to class; none stands for the paper's CIFAR-10 pairs"
    )


class Progressive(Section):
    """Train on small images first: linear in the epoch, in steps of 32 pixels (of 4 below 128)."""

    resolution: Pixels = Field(160, description="resolution until start_epoch")
    start_epoch: Count = Field(0, description="epoch from which the resolution grows")
    end_epoch: Positive = Field(1, description="epoch from which data.resolution is used")

    @model_validator(mode="after")
    def _grows(self) -> "Progressive":
        if self.end_epoch <= self.start_epoch:
            raise ValueError(
                f"end_epoch is {self.end_epoch}: give more than start_epoch, {self.start_epoch}"
            )
        return self


class Data(Section):
    source: str = Field("digits", description="where the images come from, as in `dps prepare`")
    path: str = Field("data/digits", description="folder that `dps prepare` wrote")
    noise: Noise = Field(Noise(), description="label noise, none by default")
    batch_size: Positive = Field(64, description="images a step over all workers")
    shuffle: Literal["global", "shard", "none"] = Field(
        "global", description="permute over all samples, inside each rank's shard, or not at all"
    )
    drop_last: bool = Field(True, description="leave out the last, incomplete batch of an epoch")
    resolution: Pixels = Field(8, description="side of the training images in pixels")
    eval_resolution: Pixels | None = Field(
        None, description="side of the evaluation images; none stands for data.resolution"
    )
    eval_crop: Annotated[FiniteFloat, Field(gt=0, le=1)] = Field(
        1.0, description="share of the shorter side that evaluation's centre crop keeps"
    )
    progressive: Progressive | None = Field(None, description="smaller images in early epochs")
    mean: Channels = Field((0.5, 0.5, 0.5), description="mean of red, green, blue in [0, 1]")
    std: Channels = Field((0.5, 0.5, 0.5), description="deviation of red, green, blue in [0, 1]")
    threads: Count = Field(
        0, description="loader threads; 0 takes every CPU that the process may use"
    )

    @model_validator(mode="after")
    def _fits(self) -> "Data":
        if min(self.std) < 1e-6:
            raise ValueError(f"std is {list(self.std)}: every entry must be above 1e-6")
        if self.progressive and self.progressive.resolution > self.resolution:
            raise ValueError(
                f"progressive.resolution is {self.progressive.resolution}: give at most "
                f"data.resolution, {self.resolution}"
            )
        return self


class Augment(Section):
    crop: Literal["none", "pad", "resized"] = Field(
        "none", description="pad by `pad` and crop back (CIFAR), or random resized crop (ImageNet)"
    )
    pad: Count = Field(4, description="crop=pad: black pixels added on each side")
    flip: bool = Field(False, description="mirror every second image")
    scale: tuple[Fraction, Fraction] = Field(
        (0.08, 1.0), description="crop=resized: least and largest share of the area"
    )
    ratio: tuple[FiniteFloat, FiniteFloat] = Field(
        (3 / 4, 4 / 3), description="crop=resized: least and largest width/height"
    )

    @model_validator(mode="after")
    def _ranges_ascend(self) -> "Augment":
        for name, (low, high) in (("scale", self.scale), ("ratio", self.ratio)):
            if not 0 < low <= high:
                raise ValueError(
                    f"{name} is {[low, high]}: it must ascend from above 0, as [0.5, 1.0] does"
                )
        return self


class Model(Section):
    name: str = Field("small_cnn", description="a row of `dps_dist.models`")
    stem: Literal["3x3", "7x7"] | None = Field(
        None, description="first convolution; 3x3 has stride 1 and no pooling; none: the model's"
    )
    weights: str | None = Field(
        None, description="start from a file of weights or torchvision's, such as IMAGENET1K_V1"
    )


class Train(Section):
    epochs: Positive = Field(40, description="passes over the training set")
    seed: Count = Field(0, description="decides order, crops, flips and initial weights")


class Config(Section):
    """Everything that a run depends on."""

    data: Data = Field(Data(), description="images, labels, batches")
    augment: Augment = Field(Augment(), description="what happens to an image")
    model: Model = Field(Model(), description="the classifier")
    train: Train = Field(Train(), description="how long, and from which seed")

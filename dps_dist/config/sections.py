"""The sections of a run's configuration, described field by field; `recipes/` fills them."""

from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, model_validator

from dps_dist.config.base import (
    Above0,
    AtLeast0,
    BelowOne,
    Channels,
    Count,
    Fraction,
    Pixels,
    Positive,
    Section,
)
from dps_dist.config.methods import DPS, Method


class Noise(Section):
    """Label noise, applied when the labels are read; the data on disk stays clean."""

    kind: Literal["none", "symmetric", "asymmetric"] = Field(
        "none", description="redraw labels uniformly (symmetric) or by `mapping` (asymmetric)"
    )
    rate: Fraction = Field(0.0, description="share of the labels that is redrawn")
    seed: Count = Field(0, description="which labels are hit, apart from train.seed")
    mapping: dict[int, int] | None = Field(
        None, description="asymmetric: class to class; null stands for the paper's CIFAR-10 pairs"
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
    max_per_worker: Positive | None = Field(
        None,
        description="images at once on a worker, more are accumulated over several passes; "
        "null: a worker's share when none is missing",
    )
    hold_out: Count = Field(
        0, description="training samples that are kept out, clean, for evaluation or calibration"
    )
    hold_out_seed: Count = Field(0, description="which samples are held out")
    shuffle: Literal["global", "shard", "none"] = Field(
        "global", description="permute over all samples, inside each rank's shard, or not at all"
    )
    drop_last: bool = Field(True, description="leave out the last, incomplete batch of an epoch")
    resolution: Pixels = Field(8, description="side of the training images in pixels")
    eval_resolution: Pixels | None = Field(
        None, description="side of the evaluation images; null stands for data.resolution"
    )
    eval_crop: Annotated[FiniteFloat, Field(gt=0, le=1)] = Field(
        1.0, description="share of the shorter side that evaluation's centre crop keeps"
    )
    progressive: Progressive | None = Field(None, description="smaller images in early epochs")
    mean: Channels = Field((0.5, 0.5, 0.5), description="mean of red, green, blue in [0, 1]")
    std: Channels = Field((0.5, 0.5, 0.5), description="deviation of red, green, blue in [0, 1]")
    threads: Count = Field(0, description="loader threads; 0: as many as the worker has CPUs")

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

    mix: Literal["none", "cutmix", "cutout", "mixup"] = Field(
        "none", description="what is done to whole batches; DPS does it to half of each"
    )
    mix_probability: Fraction = Field(1.0, description="share of the batches that are mixed")
    mix_alpha: Above0 = Field(1.0, description="cutmix, mixup: λ ~ Beta(alpha, alpha)")
    cutout_size: Pixels = Field(16, description="cutout: side of the square that is blanked")

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
        None, description="first convolution; 3x3 has stride 1 and no pooling; null: the model's"
    )
    weights: str | None = Field(
        None, description="start from a file of weights or torchvision's, such as IMAGENET1K_V1"
    )


class Optim(Section):
    name: Literal["adam", "adamw", "sgd"] = Field("adam", description="the optimizer")
    lr: Above0 = Field(0.01, description="highest learning rate, for the whole global batch")
    schedule: Literal["onecycle", "cosine", "constant"] = Field(
        "onecycle", description="1cycle, or cosine to 0, or constant, the last two after warm-up"
    )
    warmup_epochs: AtLeast0 = Field(0.0, description="cosine, constant: linear warm-up")
    momentum: BelowOne = Field(0.9, description="sgd: momentum; 1cycle moves it itself")
    nesterov: bool = Field(False, description="sgd: Nesterov's momentum")
    betas: tuple[BelowOne, BelowOne] = Field(
        (0.9, 0.999), description="adam, adamw: β1, β2; 1cycle moves β1 itself"
    )
    weight_decay: AtLeast0 = Field(0.0, description="weight decay")
    decay_norms_and_biases: bool = Field(
        True, description="decay normalisation weights and biases like all others"
    )
    clip_norm: Above0 | None = Field(None, description="clip gradients to this norm")
    ema: Annotated[FiniteFloat, Field(gt=0, lt=1)] | None = Field(
        None, description="keep a moving average of the weights with this decay, and evaluate it"
    )


class Checkpoint(Section):
    """When the state is saved, and how many are kept."""

    every_epochs: Positive = Field(1, description="save after every so many epochs")
    every_steps: Count = Field(0, description="also after every so many steps; 0: not")
    every_minutes: AtLeast0 = Field(0.0, description="also after so many minutes; 0: not")
    keep_last: Positive = Field(2, description="keep the newest so many")
    keep_best: bool = Field(True, description="also keep the one with the best accuracy")


class Train(Section):
    epochs: Positive = Field(40, description="passes over the training set")
    seed: Count = Field(0, description="decides order, crops, flips and initial weights")
    amp: Literal["none", "bfloat16", "float16"] = Field(
        "none", description="mixed precision; float16 needs a GPU and scales the loss"
    )
    compile: bool = Field(False, description="torch.compile the model")
    channels_last: bool = Field(True, description="keep channels innermost in memory")
    sync_batchnorm: bool = Field(False, description="batch norm over all workers; GPUs only")
    checkpoint: Checkpoint = Field(Checkpoint(), description="when to save")


class Evaluate(Section):
    split: str = Field(
        "val", description="split that is evaluated; hold_out: the samples of data.hold_out"
    )
    temperature: bool = Field(
        False, description="also figures with a temperature fitted on the held-out samples (TS)"
    )
    every_epochs: Positive = Field(1, description="evaluate after every so many epochs")
    batch_size: Positive | None = Field(
        None, description="images at once over all workers; null: as many as in training"
    )


class Launch(Section):
    """How Ray runs it; changing these does not change what is computed, but for `workers`."""

    workers: int | str = Field(
        1, description="worker processes, or MIN:MAX, as many as the cluster has at the time"
    )
    cpus_per_worker: Above0 = Field(1.0, description="CPUs of a worker, and its threads")
    gpus_per_worker: AtLeast0 | None = Field(
        None,
        description="GPUs of a worker, below 1 only for a single one; null: 1 if there are any",
    )
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        "PACK", description="Ray's placement strategy for the workers"
    )
    max_failures: Annotated[int, Field(ge=-1)] = Field(
        3, description="restarts after lost workers; -1: without limit"
    )
    timeout_s: Above0 = Field(300.0, description="seconds until a silent peer counts as lost")
    loggers: tuple[Literal["mlflow", "wandb"], ...] = Field(
        (), description="where figures go beside the run's folder and its TensorBoard files"
    )
    resize_interval_s: Above0 = Field(60.0, description="MIN:MAX: seconds between looks for nodes")

    @property
    def worker_range(self) -> tuple[int, int]:
        """The least and the largest number of workers."""
        least, _, most = str(self.workers).partition(":")
        return int(least), int(most or least)

    @model_validator(mode="after")
    def _counts_workers(self) -> "Launch":
        try:
            least, most = self.worker_range
        except ValueError:
            least, most = 0, 0
        if not 1 <= least <= most:
            raise ValueError(f"workers is {self.workers!r}: give a number such as 2, or 1:4")
        return self


class Config(Section):
    """Everything that a run depends on."""

    data: Data = Field(Data(), description="images, labels, batches")
    augment: Augment = Field(Augment(), description="what happens to an image")
    model: Model = Field(Model(), description="the classifier")
    method: Method = Field(DPS(), description="what it learns from: `name`, and its own fields")
    optim: Optim = Field(Optim(), description="optimizer and schedule")
    train: Train = Field(Train(), description="how long, from which seed, how exactly")
    evaluate: Evaluate = Field(Evaluate(), description="what is measured while training")
    launch: Launch = Field(Launch(), description="workers, resources, failures")

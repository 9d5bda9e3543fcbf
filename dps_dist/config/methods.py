"""The settings of each method: a row here, its code in methods/<name>.py.

Symbols are the papers'. Defaults are those of the DPS paper's comparison; where it is silent, the
field's own paper or public code, or our reading, is named in the method's file.
"""

import re
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, FiniteFloat, model_validator

from dps_dist.config.base import (
    Above0,
    AtLeast0,
    BelowOne,
    Fraction,
    Positive,
    Section,
    Temperature,
)


class Stored(Section):
    """A method that keeps a row of numbers for each sample, in the sharded store."""

    name: str
    device: Literal["auto", "cuda", "cpu"] = Field(
        "auto", description="where the targets live; auto: with the model if they fit beside it"
    )
    exchange: Literal["bulk", "stream"] = Field(
        "bulk", description="move targets between workers before an epoch, or a step ahead"
    )


class Baseline(Section):
    """Cross-entropy with the labels."""

    name: Literal["baseline"] = Field("baseline", description="the method")


class DPS(Stored):
    """Deep Probabilistic Supervision: the paper's symbols, and where its targets live."""

    name: Literal["dps"] = Field("dps", description="the method")
    gamma: Fraction = Field(0.95, description="discount γ of earlier predictions")
    c: Above0 = Field(1000.0, description="prior count of the label")
    epsilon: AtLeast0 = Field(0.0, description="prior count ε of every other class")
    tau: Temperature = Field(
        1.0, description="temperature τ: the loss sees the target to the power 1/τ; 0.8 under noise"
    )


class DPSPlus(Stored):
    """DPS+: DPS on a weak view, and strong views that are to be predicted alike."""

    name: Literal["dps_plus"] = Field("dps_plus", description="the method")
    gamma: Fraction = Field(0.95, description="discount γ of earlier predictions")
    c: Above0 = Field(1000.0, description="prior count of the label")
    epsilon: AtLeast0 = Field(0.0, description="prior count ε of every other class")
    tau: Temperature = Field(0.8, description="temperature τ of the targets in the loss")
    lambda_c: AtLeast0 = Field(
        4.0, description="weight λ_c of the consistency; more under more noise"
    )
    strong_views: Positive = Field(2, description="strong views m of each image")
    erase: Fraction = Field(0.5, description="share of the strong views with a piece erased")


class TE(Stored):
    """Temporal Ensembling: predictions are to stay near their own moving average."""

    name: Literal["te"] = Field("te", description="the method")
    a: BelowOne = Field(0.6, description="weight a of the earlier predictions in the average")
    w_max: AtLeast0 = Field(30.0, description="weight of the consistency after its ramp-up")
    rampup_epochs: AtLeast0 = Field(100.0, description="epochs over which that weight grows")
    rampdown_epochs: AtLeast0 = Field(50.0, description="last epochs, in which β1 is annealed")
    beta1_end: BelowOne = Field(0.0, description="Adam's β1 at the end")
    anneal_sgd: bool = Field(False, description="anneal the momentum of SGD as well")


class PSKD(Stored):
    """PS-KD: targets move from the labels towards the predictions of the epoch before."""

    name: Literal["pskd"] = Field("pskd", description="the method")
    alpha_T: Fraction = Field(  # noqa: N815  (the paper's symbol)
        0.8, description="share of the prediction in the last epoch's targets"
    )


class ELR(Stored):
    """Early-learning regularisation: stay with what was learnt before wrong labels were."""

    name: Literal["elr"] = Field("elr", description="the method")
    beta: BelowOne = Field(0.7, description="weight β of the earlier predictions in the average")
    lam: AtLeast0 = Field(3.0, description="weight λ of the regulariser")


class DLB(Section):
    """DLB: the step before is seen again in another view, and to be predicted as then."""

    name: Literal["dlb"] = Field("dlb", description="the method")
    T: Temperature = Field(3.0, description="temperature of the distillation")
    alpha: AtLeast0 = Field(1.0, description="weight α of the distillation")


class LS(Section):
    """Label smoothing."""

    name: Literal["ls"] = Field("ls", description="the method")
    s: Fraction = Field(0.1, description="share of the target that is spread over all classes")


class SL(Section):
    """Symmetric cross-entropy learning, against wrong labels."""

    name: Literal["sl"] = Field("sl", description="the method")
    alpha: AtLeast0 = Field(0.1, description="weight α of the cross-entropy; 6 for CIFAR-100")
    beta: AtLeast0 = Field(1.0, description="weight β of its reverse; 0.1 for CIFAR-100")


class MMCE(Section):
    """MMCE, weighted: a kernel's measure of miscalibration in the batch."""

    name: Literal["mmce"] = Field("mmce", description="the method")
    lam: AtLeast0 = Field(2.0, description="weight λ of √M")
    width: Above0 = Field(0.4, description="width of the kernel exp(−|r−r'|/width)")


class CRL(Stored):
    """Correctness ranking: who was right more often is to be more confident."""

    name: Literal["crl"] = Field("crl", description="the method")
    lam: AtLeast0 = Field(1.0, description="weight λ of the ranking loss")


class MDCA(Section):
    """MDCA: each class is to be predicted as often, on average, as it occurs in the batch."""

    name: Literal["mdca"] = Field("mdca", description="the method")
    beta: AtLeast0 = Field(1.0, description="weight β of the difference")


class AdaFocal(Section):
    """AdaFocal: a focal loss whose γ follows the calibration on held-out samples."""

    name: Literal["adafocal"] = Field("adafocal", description="the method")
    gamma_start: FiniteFloat = Field(1.0, description="γ of every bin in the first epoch")
    lam: AtLeast0 = Field(1.0, description="how fast γ follows")
    bins: Positive = Field(15, description="bins of equal mass")
    switch: Above0 = Field(0.2, description="below this |γ| changes its sign")
    gamma_min: FiniteFloat = Field(-2.0, description="least γ")
    gamma_max: FiniteFloat = Field(20.0, description="greatest γ")

    @model_validator(mode="after")
    def _in_range(self) -> "AdaFocal":
        if not self.gamma_min <= self.gamma_start <= self.gamma_max:
            raise ValueError(
                f"gamma_start is {self.gamma_start}: give {self.gamma_min} to {self.gamma_max}, "
                "gamma_min to gamma_max"
            )
        if min(abs(self.gamma_start), -self.gamma_min, self.gamma_max) < self.switch:
            raise ValueError(
                f"switch is {self.switch}: give less than -gamma_min, gamma_max and |gamma_start|"
            )
        return self


class CPC(Section):
    """CPC: pairs of classes, the label against others and others among themselves."""

    name: Literal["cpc"] = Field("cpc", description="the method")
    lambda_1: AtLeast0 = Field(0.1, description="weight λ₁ of the label against the others")
    lambda_2: AtLeast0 = Field(1.0, description="weight λ₂ of the others among themselves")


class MbLS(Section):
    """Margin-based label smoothing: logits further than a margin below the largest cost."""

    name: Literal["mbls"] = Field("mbls", description="the method")
    alpha: AtLeast0 = Field(0.1, description="weight α of the penalty")
    margin: AtLeast0 = Field(10.0, description="margin m; 6 for CIFAR-10")


class ACLS(Section):
    """ACLS: smoothing that adapts, by squares beyond a margin."""

    name: Literal["acls"] = Field("acls", description="the method")
    weight: AtLeast0 = Field(0.1, description="weight of the regulariser")
    others: AtLeast0 = Field(0.1, description="weight, in it, of the logits that are not largest")
    margin: AtLeast0 = Field(10.0, description="margin m")


Task = Annotated[
    Baseline | LS | SL | MMCE | MDCA | AdaFocal | CPC | MbLS | ACLS, Field(discriminator="name")
]


class KD(Section):
    """Knowledge distillation from trained runs: one teacher, or the mean of an ensemble."""

    name: Literal["kd"] = Field("kd", description="the method")
    teachers: tuple[str, ...] = Field((), description="folders of the runs that teach")
    T: Temperature = Field(3.0, description="temperature of the distillation")
    lam: Fraction = Field(0.9, description="share λ of the distillation")
    task: Task = Field(Baseline(), description="the other share: the loss with the labels")

    @model_validator(mode="after")
    def _without_passwords(self) -> "KD":
        for teacher in self.teachers:
            if found := re.match(r"([^:]*://)[^/@]*@", teacher):
                raise ValueError(
                    f"teachers holds {found[1]}***@…, a password that config.yaml would keep: give "
                    "credentials by the machine's role or environment"
                )
        return self


Method = Annotated[
    Baseline
    | DPS
    | DPSPlus
    | TE
    | PSKD
    | DLB
    | KD
    | LS
    | SL
    | ELR
    | MMCE
    | CRL
    | MDCA
    | AdaFocal
    | CPC
    | MbLS
    | ACLS,
    Field(discriminator="name"),
]
METHODS: tuple[type[Any], ...] = get_args(get_args(Method)[0])  # the settings of each

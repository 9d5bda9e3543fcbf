"""Configuration and recipes: what resolves, and the sentence for what does not."""

from functools import cache
from itertools import permutations

import pytest
import yaml

from dps_dist import config, recipes
from dps_dist.config import DPS, KD, TE, Baseline, Config, MbLS
from dps_dist.errors import InputError
from dps_dist.models import build
from dps_dist.recipes import compose, files, paper

NUM_CLASSES = {"cifar10": 10, "cifar100": 100, "tinyimagenet": 200, "imagefolder": 1000}


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_resolves_and_says_what_it_is(name):
    config = recipes.load(name)
    assert recipes.description(name)
    assert yaml.safe_load(recipes.as_yaml(config)) == config.model_dump(mode="json")


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_has_a_model_that_can_be_built(name):
    import torch

    config = recipes.load(name)
    with torch.device("meta"):
        build(config.model.name, 10, stem=config.model.stem, image_size=config.data.resolution)


@pytest.mark.parametrize("name", recipes.names())
def test_a_resolved_recipe_is_a_recipe(name, tmp_path):
    file = tmp_path / "again.yaml"
    file.write_text(recipes.as_yaml(recipes.load(name)))
    assert recipes.load(str(file)) == recipes.load(name)


# The paper's recipes


@cache
def loaded(name):
    return recipes.load(name)


def field(name, path):
    value = loaded(name)
    for key in path.split("."):
        value = getattr(value, key)
    return value


def test_every_row_of_the_paper_has_its_recipes():
    rows = {table.id: len(table.rows) for table in paper.tables()}
    assert rows == {
        "accuracy": 11,
        "calibration": 6,
        "corruptions": 3,
        "noise": 10,
        "mixes": 11,
        "ood": 6,
        "wrn": 21,
    }
    cells = {t.id: sum(len(row.cells) for row in t.rows) for t in paper.tables()}
    assert cells == {
        "accuracy": 77,
        "calibration": 30,
        "corruptions": 30,
        "noise": 60,
        "mixes": 66,
        "ood": 30,
        "wrn": 84,
    }
    cited = {row.name for table in paper.tables() for row in table.rows if not row.recipes}
    assert cited == {"OT-Filter", "CSOT", "DULC"}
    # 11 models × 6 methods, 11 × 3 methods × 2 mixes, 7 methods × 6 noises, 21 for calibration
    assert len(paper.recipes()) == 66 + 66 + 42 + 21


def test_every_recipe_of_the_paper_is_another_configuration():
    found = {}
    for name in paper.recipes():
        found.setdefault(loaded(name).model_dump_json(), []).append(name)
    assert [names for names in found.values() if len(names) > 1] == []


def test_every_model_of_the_paper_can_be_built():
    import torch

    models = {
        (c.model.name, NUM_CLASSES[c.data.source], c.model.stem, c.data.resolution)
        for c in map(loaded, paper.recipes())
    }
    assert len(models) == 13
    assert {name for name, *_ in models} == {
        *("resnet18", "resnet50", "resnet101", "resnet152", "preact_resnet18", "wide_resnet40_1"),
        *("densenet121", "densenet169", "densenet201", "densenet264", "vit_b_16"),
    }
    for name, num_classes, stem, resolution in models:
        with torch.device("meta"):
            build(name, num_classes, stem=stem, image_size=resolution)


def test_stems_and_weights():
    for name in paper.recipes():
        vit, large = "vit_b_16" in name, name.startswith("imagenet-")
        assert field(name, "model.stem") == (None if vit else "7x7" if large else "3x3")
        assert field(name, "model.weights") == ("IMAGENET1K_V1" if vit else None)


def test_every_recipe_of_the_paper_has_an_optimizer_and_a_schedule():
    import torch

    from dps_dist.train.optim import optimizer, schedule

    for optim, epochs in {(c.optim, c.train.epochs) for c in map(loaded, paper.recipes())}:
        trained = optimizer(optim, torch.nn.Linear(2, 2))
        rates, found = schedule(optim, trained, 10, epochs), []
        for _ in range(10 * epochs - 1):
            found += rates.get_last_lr()
            trained.step()
            rates.step()
        ends = {"onecycle": optim.lr / 250_000, "cosine": 0, "constant": optim.lr}
        assert max(found) == pytest.approx(optim.lr)
        assert rates.get_last_lr()[0] == pytest.approx(ends[optim.schedule])


def test_every_recipe_of_the_paper_can_be_trained():
    """KD needs its teachers; else no method lacks, or is asked for, what it cannot do."""
    from dps_dist import methods
    from dps_dist.train.setup import check_method

    for run in map(loaded, paper.recipes()):
        method = methods.build(run.method)
        if run.method.name == "kd":
            with pytest.raises(InputError, match=r"method.teachers is empty: .*--set"):
                check_method(run, method)
            method.teachers = ("runs/a", "runs/b", "runs/c")
        check_method(run, method)


def test_the_small_comparison_shifts_from_prior_to_evidence_when_the_paper_does():
    """The prior's weight γᵗc/(γᵗc + B_t) falls below ½ after the same share of the epochs."""

    def share(name):
        run = loaded(name)
        gamma, c, epochs = run.method.gamma, run.method.c, run.train.epochs
        weights = (gamma**t * c * (1 - gamma) / (1 - gamma**t) for t in range(1, epochs))
        return next(t for t, ratio in enumerate(weights, 1) if ratio < 1) / epochs

    for part, paper_part in (("", ""), ("-sym40", "-sym50")):
        small, large = f"cifar10-wrn10_2{part}", f"cifar10-resnet18{paper_part}"
        assert share(small) == pytest.approx(share(large), abs=1 / loaded(small).train.epochs)
        for field in ("gamma", "tau"):
            assert getattr(loaded(small).method, field) == getattr(loaded(large).method, field)


def test_a_field_that_stands_twice_is_refused(tmp_path):
    file = tmp_path / "twice.yaml"
    file.write_text("extends: digits\ntrain:\n  epochs: 1\n  seed: 2\n  epochs: 3\n")
    with pytest.raises(InputError, match="at line 5; epochs stands there twice"):
        recipes.load(str(file))


def test_every_part_is_used_by_the_paper():
    used = {part for name in paper.recipes() for part in compose.split(name)[1]}
    assert set(recipes.parts()) - used == {"elr", "sym40"}  # a peer, and noise of our own runs


def test_every_method_is_a_part():
    methods = {m.model_fields["name"].default for m in config.Method.__args__[0].__args__}
    assert methods <= set(recipes.parts())
    for method in methods:
        assert loaded(f"digits-{method}").method.name == method
    tasks = {t.model_fields["name"].default for t in config.Task.__args__[0].__args__}
    for task in tasks - {"baseline"}:
        assert loaded(f"digits-kd-{task}").method.task.name == task


def test_every_base_takes_every_part():
    for base in recipes.names():
        for part in recipes.parts():
            loaded(f"{base}-{part}")


# What the paper says, and our readings where it is silent, written down once more.
CIFAR = {
    "optim.name": "adam",
    "optim.lr": 0.01,
    "optim.schedule": "onecycle",
    "optim.clip_norm": None,
    "data.batch_size": 256,
    "data.hold_out": 0,
    "augment.crop": "pad",
    "augment.pad": 4,
    "augment.flip": True,
    "model.stem": "3x3",
    "train.epochs": 200,
}
VIT = CIFAR | {
    "optim.lr": 5e-5,
    "train.epochs": 40,
    "data.resolution": 224,
    "model.name": "vit_b_16",
    "model.stem": None,
    "model.weights": "IMAGENET1K_V1",
}
IMAGENET = {
    "optim.name": "sgd",
    "optim.lr": 0.5,
    "optim.schedule": "cosine",
    "optim.warmup_epochs": 5,
    "optim.momentum": 0.9,
    "optim.weight_decay": 1e-4,
    "data.batch_size": 1024,
    "data.resolution": 224,
    "data.eval_crop": 0.875,
    "augment.crop": "resized",
    "augment.flip": True,
    "model.stem": "7x7",
    "train.epochs": 200,
    "launch.workers": 8,
}
DPS_PLUS = CIFAR | {
    "model.name": "preact_resnet18",
    "optim.name": "sgd",
    "optim.lr": 0.02,
    "optim.schedule": "cosine",
    "optim.warmup_epochs": 0,
    "optim.momentum": 0.9,
    "optim.weight_decay": 5e-4,
    "data.batch_size": 128,
    "train.epochs": 300,
}


def dps(gamma, c, epsilon=0, tau=1):
    return {
        "method.name": "dps",
        "method.gamma": gamma,
        "method.c": c,
        "method.epsilon": epsilon,
        "method.tau": tau,
    }


def te(w_max, up=100, down=50):
    return {
        "method.name": "te",
        "method.a": 0.6,
        "method.w_max": w_max,
        "method.rampup_epochs": up,
        "method.rampdown_epochs": down,
        "method.beta1_end": 0,
        "method.anneal_sgd": False,
    }


def dlb(epochs):
    return {"method.name": "dlb", "method.T": 3, "method.alpha": 1, "train.epochs": epochs}


def pskd(alpha):
    return {"method.name": "pskd", "method.alpha_T": alpha}


KD_ = {"method.name": "kd", "method.T": 3, "method.lam": 0.9, "method.teachers": ()}


def dps_plus(lambda_c):
    return {
        "method.name": "dps_plus",
        "method.gamma": 0.95,
        "method.c": 1000,
        "method.tau": 0.8,
        "method.strong_views": 2,
        "method.erase": 0.5,
        "method.lambda_c": lambda_c,
    }


def mix(kind, probability=1.0, size=None):
    cutout = {} if size is None else {"augment.cutout_size": size}
    return {"augment.mix": kind, "augment.mix_probability": probability, **cutout}


def noise(kind, rate):
    return {"data.noise.kind": kind, "data.noise.rate": rate}


SYM, ASYM = "symmetric", "asymmetric"
OURS = [
    # method by method
    ("cifar10-resnet18-dps", CIFAR | dps(0.95, 1000) | mix("none") | noise("none", 0)),
    ("cifar10-densenet121-baseline", CIFAR | {"model.name": "densenet121"}),
    ("cifar10-resnet18-te", CIFAR | te(30)),
    ("cifar10-resnet18-dlb", CIFAR | dlb(100)),
    ("cifar10-densenet121-pskd", CIFAR | pskd(0.8)),
    ("cifar10-resnet18-kd", CIFAR | KD_),
    ("cifar10-vit_b_16-dps", VIT | dps(0.95, 50)),
    ("cifar10-vit_b_16-te", VIT | te(30, 20, 10)),
    ("cifar10-vit_b_16-dlb", VIT | dlb(20)),
    ("cifar100-resnet50-dps", CIFAR | dps(0.95, 1000) | {"data.source": "cifar100"}),
    ("cifar100-densenet169-te", CIFAR | te(100) | {"model.name": "densenet169"}),
    ("cifar100-vit_b_16-te", VIT | te(100, 20, 10) | {"data.source": "cifar100"}),
    ("cifar100-vit_b_16-dps", VIT | dps(0.95, 50)),
    ("cifar100-vit_b_16-baseline", VIT | {"data.path": "data/cifar100"}),
    ("tinyimagenet-resnet101-dps", CIFAR | dps(0.95, 1000) | {"data.resolution": 64}),
    ("tinyimagenet-densenet201-te", CIFAR | te(100) | {"model.name": "densenet201"}),
    ("tinyimagenet-vit_b_16-dps", VIT | dps(0.95, 50) | {"data.source": "tinyimagenet"}),
    ("imagenet-resnet152-dps", IMAGENET | dps(0.99, 1000, 0.05)),
    ("imagenet-densenet264-te", IMAGENET | te(100, 45, 25) | {"model.name": "densenet264"}),
    ("imagenet-densenet264-dlb", IMAGENET | dlb(100)),
    ("imagenet-resnet152-pskd", IMAGENET | pskd(0.3)),
    ("imagenet-densenet264-kd", IMAGENET | KD_),
    # CutMix and CutOut
    ("cifar10-resnet18-baseline-cutmix", CIFAR | mix("cutmix", 0.5)),
    ("cifar10-resnet18-dlb-cutmix", CIFAR | dlb(100) | mix("cutmix", 0.5)),
    ("cifar10-resnet18-dps-cutmix", CIFAR | dps(0.9, 500) | mix("cutmix")),
    ("cifar10-resnet18-dps-cutout", CIFAR | dps(0.9, 500) | mix("cutout", 1, 16)),
    ("cifar100-resnet50-baseline-cutout", CIFAR | mix("cutout", 1, 8)),
    ("cifar100-densenet169-dps-cutmix", CIFAR | dps(0.9, 500) | mix("cutmix")),
    ("cifar10-vit_b_16-dps-cutmix", VIT | dps(0.9, 25) | mix("cutmix")),
    ("cifar10-vit_b_16-dlb-cutout", VIT | dlb(20) | mix("cutout", 1, 112)),
    ("cifar100-vit_b_16-dps-cutout", VIT | dps(0.9, 25) | mix("cutout", 1, 56)),
    ("tinyimagenet-resnet101-baseline-cutmix", CIFAR | mix("cutmix", 0.5)),
    ("tinyimagenet-densenet201-dlb-cutout", CIFAR | dlb(100) | mix("cutout", 1, 32)),
    ("tinyimagenet-vit_b_16-dps-cutout", VIT | dps(0.9, 25) | mix("cutout", 1, 112)),
    ("imagenet-resnet152-baseline-cutmix", IMAGENET | mix("cutmix", 1)),
    ("imagenet-resnet152-dlb-cutmix", IMAGENET | dlb(100) | mix("cutmix", 1)),
    ("imagenet-resnet152-dps-cutmix", IMAGENET | dps(0.98, 1000, 0.05) | mix("cutmix")),
    ("imagenet-densenet264-dps-cutout", IMAGENET | dps(0.98, 1000, 0.05) | mix("cutout", 1, 112)),
    # label noise
    ("cifar10-resnet18-dps-sym80", CIFAR | dps(0.85, 2000, 0, 0.8) | noise(SYM, 0.8)),
    ("cifar10-resnet18-dps-asym10", CIFAR | dps(0.9, 1000, 0, 0.8) | noise(ASYM, 0.1)),
    ("cifar10-resnet18-te-sym20", CIFAR | te(300) | noise(SYM, 0.2)),
    ("cifar10-resnet18-te-sym50", CIFAR | te(3000) | noise(SYM, 0.5)),
    ("cifar10-resnet18-te-sym80", CIFAR | te(3000)),
    ("cifar10-resnet18-te-asym40", CIFAR | te(300) | noise(ASYM, 0.4)),
    ("cifar10-resnet18-baseline-mixup-sym50", CIFAR | mix("mixup") | {"augment.mix_alpha": 1}),
    ("cifar10-resnet18-ls-asym30", CIFAR | {"method.s": 0.1} | noise(ASYM, 0.3)),
    ("cifar10-resnet18-sl-sym20", CIFAR | {"method.alpha": 0.1, "method.beta": 1}),
    ("cifar10-preact_resnet18-dps_plus-sym20", DPS_PLUS | dps_plus(4) | noise(SYM, 0.2)),
    ("cifar10-preact_resnet18-dps_plus-sym50", DPS_PLUS | dps_plus(7)),
    ("cifar10-preact_resnet18-dps_plus-sym80", DPS_PLUS | dps_plus(14)),
    ("cifar10-preact_resnet18-dps_plus-asym10", DPS_PLUS | dps_plus(2)),
    ("cifar10-preact_resnet18-dps_plus-asym40", DPS_PLUS | dps_plus(2) | noise(ASYM, 0.4)),
    ("cifar10-resnet18-elr-sym20", {"method.beta": 0.7, "method.lam": 3}),
    ("cifar10-resnet18-elr-asym40", {"method.beta": 0.9, "method.lam": 1}),
    # calibration
    ("cifar100-wrn40_1-dps", CIFAR | dps(0.97, 2000) | {"model.name": "wide_resnet40_1"}),
    ("cifar100-wrn40_1-g96_c3000", CIFAR | dps(0.96, 3000)),
    ("cifar100-wrn40_1-g95_c4000", CIFAR | dps(0.95, 4000)),
    ("cifar100-wrn40_1-baseline-ts", {"evaluate.temperature": True, "data.hold_out": 5000}),
    ("cifar100-wrn40_1-adafocal", {"optim.clip_norm": 2, "data.hold_out": 5000}),
    ("cifar100-wrn40_1-mmce", CIFAR | {"method.lam": 2, "method.width": 0.4}),
    ("cifar100-wrn40_1-crl", CIFAR | {"method.lam": 1}),
    ("cifar100-wrn40_1-cpc", CIFAR | {"method.lambda_1": 0.1, "method.lambda_2": 1}),
    ("cifar100-wrn40_1-mbls", CIFAR | {"method.alpha": 0.1, "method.margin": 10}),
    ("cifar100-wrn40_1-acls", CIFAR | {"method.weight": 0.1, "method.margin": 10}),
    ("cifar100-wrn40_1-kd-mixup", CIFAR | KD_ | mix("mixup") | {"method.task.name": "baseline"}),
    ("cifar100-wrn40_1-kd-mdca", CIFAR | KD_ | {"method.task.name": "mdca"}),
    (
        "cifar100-wrn40_1-kd-adafocal",
        KD_ | {"method.task.name": "adafocal", "optim.clip_norm": 2, "data.hold_out": 5000},
    ),
    # what the paper has no row of
    ("cifar10-resnet18-mbls", {"method.margin": 6}),
    ("cifar10-preact_resnet18-dps_plus-sym40", DPS_PLUS | dps_plus(6) | noise(SYM, 0.4)),
    ("cifar10-resnet18-kd-mbls", KD_ | {"method.task.margin": 6}),
    ("cifar100-resnet50-kd-mbls", KD_ | {"method.task.margin": 10}),
    ("cifar100-resnet50-sl", {"method.alpha": 6, "method.beta": 0.1}),
    ("cifar100-resnet50-kd-sl", {"method.task.alpha": 6, "method.task.beta": 0.1}),
    ("digits-dlb", dlb(20)),
    ("digits-adafocal", {"data.hold_out": 200}),
]


@pytest.mark.parametrize(("name", "expected"), OURS, ids=[name for name, _ in OURS])
def test_settings_are_those_of_the_paper(name, expected):
    assert {path: field(name, path) for path in expected} == expected


RESNET18 = {
    "data": {
        "source": "cifar10",
        "path": "data/cifar10",
        "batch_size": 256,
        "resolution": 32,
        "mean": (0.4914, 0.4822, 0.4465),
        "std": (0.2470, 0.2435, 0.2616),
    },
    "augment": {"crop": "pad", "pad": 4, "flip": True},
    "model": {"name": "resnet18", "stem": "3x3"},
    "method": {"name": "dps", "gamma": 0.95, "c": 1000},
    "optim": {"name": "adam", "lr": 0.01, "schedule": "onecycle"},
    "train": {"epochs": 200},
}
DIGITS = {
    "data": {
        "source": "digits",
        "path": "data/digits",
        "batch_size": 64,
        "resolution": 8,
        "mean": (0.3, 0.3, 0.3),
        "std": (0.38, 0.38, 0.38),
    },
    "augment": {"crop": "pad", "pad": 1},
    "model": {"name": "small_cnn"},
    "method": {"name": "dps", "gamma": 0.85, "c": 100},
    "optim": {"name": "adam", "lr": 0.01, "schedule": "onecycle"},
    "train": {"epochs": 40},
    "launch": {"workers": 2},
}
NOISY = {"name": "dps", "gamma": 0.85, "c": 2000, "tau": 0.8}


def changed(base, **sections):
    return {key: {**base.get(key, {}), **sections.get(key, {})} for key in {**base, **sections}}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("cifar10-resnet18", RESNET18),
        *(
            (
                f"cifar10-resnet18-sym{rate}",
                changed(
                    RESNET18,
                    data={"noise": {"kind": "symmetric", "rate": rate / 100}},
                    method=NOISY,
                ),
            )
            for rate in (20, 50, 80)
        ),
        (
            "cifar10-resnet18-asym40",
            changed(
                RESNET18,
                data={"noise": {"kind": "asymmetric", "rate": 0.4}},
                method={"gamma": 0.9, "c": 1000, "tau": 0.8},
            ),
        ),
        (
            "cifar100-resnet50",
            changed(
                RESNET18,
                data={
                    "source": "cifar100",
                    "path": "data/cifar100",
                    "mean": (0.5071, 0.4865, 0.4409),
                    "std": (0.2673, 0.2564, 0.2762),
                },
                model={"name": "resnet50"},
            ),
        ),
        (
            "tinyimagenet-resnet101",
            changed(
                RESNET18,
                data={
                    "source": "tinyimagenet",
                    "path": "data/tinyimagenet",
                    "resolution": 64,
                    "mean": (0.4802, 0.4481, 0.3975),
                    "std": (0.2770, 0.2691, 0.2821),
                },
                model={"name": "resnet101"},
            ),
        ),
        (
            "imagenet-resnet152",
            {
                "data": {
                    "source": "imagefolder",
                    "path": "data/imagenet",
                    "batch_size": 1024,
                    "resolution": 224,
                    "eval_crop": 0.875,
                    "mean": (0.485, 0.456, 0.406),
                    "std": (0.229, 0.224, 0.225),
                },
                "augment": {"crop": "resized", "flip": True},
                "model": {"name": "resnet152", "stem": "7x7"},
                "method": {"name": "dps", "gamma": 0.99, "c": 1000, "epsilon": 0.05},
                "optim": {
                    "name": "sgd",
                    "lr": 0.5,
                    "schedule": "cosine",
                    "warmup_epochs": 5,
                    "momentum": 0.9,
                    "weight_decay": 1e-4,
                },
                "train": {"epochs": 200, "amp": "bfloat16"},
                "launch": {"workers": 8, "cpus_per_worker": 8},
            },
        ),
        ("digits", DIGITS),
        (
            "digits-sym40",
            changed(
                DIGITS,
                data={"noise": {"kind": "symmetric", "rate": 0.4}},
                method={"tau": 0.8},
            ),
        ),
    ],
)
def test_the_first_recipes_are_what_they_were(name, fields):
    """Every field, so those too that they leave at their defaults."""
    assert loaded(name) == Config.model_validate(fields)


def test_figures_are_the_papers():
    figures = {
        (table.id, row.name, cell.column, cell.metric): (cell.value, cell.std)
        for table in paper.tables()
        for row in table.rows
        for cell in row.cells
    }
    assert len(figures) == 77 + 30 + 30 + 60 + 66 + 30 + 84
    for key, figure in {
        ("accuracy", "CIFAR-10, ResNet-18", "Baseline", "accuracy"): (94.39, 0.18),
        ("accuracy", "CIFAR-10, ResNet-18", "Ens.", "ensemble_accuracy"): (95.33, None),
        ("accuracy", "CIFAR-100, ResNet-50", "DPS", "accuracy"): (79.09, 0.11),
        ("accuracy", "ImageNet, DenseNet-264", "KD", "accuracy"): (78.56, 0.06),
        ("calibration", "ResNet-50, ECE", "DPS", "ece"): (7.17, 0.40),
        ("calibration", "ResNet-50, NLL", "Baseline", "nll"): (2.94, 0.04),
        ("corruptions", "ViT-B", "P DPS", "mfp"): (2.11, 0.07),
        ("noise", "TE", "sym80", "best_accuracy"): (72.61, 0.74),
        ("noise", "OT-Filter", "asym10", "best_accuracy"): (None, None),
        ("noise", "DPS+", "asym40", "best_accuracy"): (95.6, 0.25),
        ("mixes", "TinyImageNet, DenseNet-201", "CutMix Baseline", "accuracy"): (66.54, 0.60),
        ("ood", "CIFAR-100, DenseNet-169", "TE", "auroc"): (68.97, 6.85),
        ("wrn", "KD + MDCA", "ECE", "ece"): (0.98, None),
        ("wrn", "TS", "ECE", "ece_ts"): (2.57, None),
        ("wrn", "DPS, γ = 0.96, c = 3000", "ACE", "ace"): (3.19, 0.12),
    }.items():
        assert figures[key] == figure, key


def test_a_recipe_finds_its_rows_whatever_it_is_called():
    def where(name):
        return [(table.id, row.name, cell.metric) for table, row, cell in paper.rows_of(name)]

    assert where("cifar10-resnet18-sym20") == [("noise", "DPS", "best_accuracy")]
    assert where("cifar10-resnet18-sym20-dps") == where("cifar10-resnet18-sym20")
    assert where("cifar100-wrn40_1-mdca-kd") == where("cifar100-wrn40_1-kd-mdca") != []
    assert where("cifar100-resnet50") == [
        ("accuracy", "CIFAR-100, ResNet-50", "accuracy"),
        ("calibration", "ResNet-50, ECE", "ece"),
        ("calibration", "ResNet-50, NLL", "nll"),
        ("ood", "CIFAR-100, ResNet-50", "auroc"),
    ]
    notes = [cell.note for _, _, cell in paper.rows_of("cifar10-densenet121-baseline")]
    assert notes == ["", "mean softmax of 3 runs", "", "", ""]
    assert where("digits") == where("mine.yaml") == where("cifar10-resnet18-elr") == []


def test_recipes_in_braces():
    assert paper.in_braces([]) == ""
    assert paper.in_braces(["a-b"]) == "a-b"
    assert paper.in_braces(["a-b-c", "a-b-d-e"]) == "a-b-{c,d-e}"
    assert paper.in_braces(["a-bc", "a-bd"]) == "a-{bc,bd}"


# Composition


def test_the_order_of_parts_does_not_matter():
    for name in (
        "cifar10-resnet18-te-sym50",
        "cifar100-wrn40_1-kd-adafocal-ts-cutmix",
        "cifar10-resnet18-baseline-sym20-cutmix",
        "digits-sym40-kd-mbls-cutout",
    ):
        base, parts = compose.split(name)
        for order in permutations(parts):
            assert recipes.load("-".join([base, *order])) == loaded(name)


def test_dps_need_not_be_named():
    for name in ("cifar10-resnet18", "cifar10-resnet18-cutmix", "cifar10-resnet18-asym10"):
        assert loaded(name) == loaded(f"{name}-dps")


def test_a_composed_recipe_says_what_it_is():
    assert recipes.description("cifar10-resnet18-sym20-te") == (
        "ResNet-18 on CIFAR-10; 20% symmetric label noise; Temporal Ensembling"
    )
    assert all(recipes.part_description(part) for part in recipes.parts())


def test_a_file_may_extend_a_composed_recipe(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "extends: cifar10-resnet18-te-sym20\nmethod: {w_max: 5}\n"
        "with: {sym20+te: {train: {epochs: 3}}, sym50: {train: {seed: 9}}}"
    )
    config = recipes.load(str(mine))
    assert config.method == TE(w_max=5)  # not the 300 of the noise
    assert (config.train.epochs, config.train.seed) == (3, 0)
    assert config.data == loaded("cifar10-resnet18-te-sym20").data
    assert recipes.load(str(mine), ["train.epochs=4"]).train.epochs == 4
    (tmp_path / "more.yaml").write_text("extends: mine.yaml\nwith: {te: {method: {w_max: 6}}}")
    assert recipes.load(str(tmp_path / "more.yaml")).method.w_max == 6
    mine.write_text("with: {dps: {data: {noise: {kind: asymmetric, mapping: {3: 5}}}}}")
    assert recipes.load(str(mine)).data.noise.mapping == {3: 5}


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """Write recipes and parts that stand in for the package's."""
    monkeypatch.setattr(files, "FOLDER", tmp_path)
    monkeypatch.setattr(files, "PARTS", tmp_path / "parts")
    (tmp_path / "parts").mkdir()

    def write(**texts):
        for name, text in texts.items():
            (tmp_path / f"{name.replace('__', '/')}.yaml").write_text(text)

    return write


def test_with_has_an_order(shelf):
    epochs = "{{train: {{epochs: {}}}}}".format
    shelf(
        parts__a="train: {seed: 1}",
        parts__b="{}",
        parts__dps="method: {name: dps}",
        parts__te="method: {name: te}",
        root=f"train: {{epochs: 1}}\nwith: {{a+b: {epochs(7)}, a: {epochs(2)}, dps: {epochs(3)}}}",
        leaf=f"extends: root\ntrain: {{epochs: 4}}\nwith: {{b: {epochs(5)}, te: {epochs(6)}}}",
    )

    def found(name):
        return recipes.load(name).train.epochs

    assert found("root") == 3 and found("root-dps") == 3  # the method counts, named or not
    assert found("root-te") == 1 and found("leaf-te") == 6
    assert found("leaf") == 3  # `with` comes after all the files' own fields
    assert found("leaf-b") == 5  # as many names: the later file
    assert found("leaf-a-te") == 6 and found("root-a-te") == 2
    assert found("leaf-a-b") == 7 and found("leaf-b-te-a") == 7  # more names: later
    shelf(parts__a=f"train: {{seed: 1}}\nwith: {{a+b+te: {epochs(8)}, a+te: {epochs(9)}}}")
    assert found("leaf-b-te-a") == 8 and found("leaf-te-a") == 9


def test_the_longest_file_is_the_base(shelf):
    shelf(x="train: {epochs: 1}", parts__y="train: {epochs: 2}", parts__z="train: {seed: 3}")
    assert recipes.load("x-y-z").train.epochs == 2
    (files.FOLDER / "x-y.yaml").write_text("train: {epochs: 5}")
    assert recipes.load("x-y-z").train == recipes.load("x-y", ["train.seed=3"]).train
    assert recipes.load("x-y-z").train.epochs == 5
    assert recipes.load("x-z-y").train.epochs == 2  # no file begins so


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cifar10-resnet81-te", "does not exist: did you mean cifar10-resnet18"),
        ("cifar10-resnet18-sym2", "sym2 is not a part: did you mean sym20. the parts are acls, "),
        ("cifar10-resnet18-zzz", "zzz is not a part: the parts are acls, adafocal, asym10"),
        ("cifar10-resnet18-", " is not a part: the parts are acls"),
        ("cifar10-resnet18-te-te", "names te twice"),
        ("cifar10-resnet18-te-dlb", "dlb and te both set method.name: take one"),
        ("cifar10-resnet18-kd-te", "kd and te both set method.name: take one"),
        ("cifar10-resnet18-kd-mdca-cpc", "cpc and mdca both set method.name"),
        ("cifar10-resnet18-cutmix-mixup", "cutmix and mixup both set augment.mix: take one"),
        ("cifar10-resnet18-sym20-sym50", "sym20 and sym50 both set data.noise.rate: take one"),
        ("cifar10-resnet18-sym20-cutmix", r"cutmix\+dps and dps\+sym20 set method.gamma"),
        (
            "cifar100-wrn40_1-g95_c4000-g96_c3000",
            "set method.gamma differently, and nothing is known of them together",
        ),
        ("../recipes/digits", "does not exist"),
        ("parts/te", "does not exist"),
        ("", "recipe  does not exist"),
    ],
)
def test_a_wrong_name_gets_its_sentence(name, said):
    with pytest.raises(InputError, match=said) as caught:
        recipes.load(name)
    assert "\n" not in str(caught.value)


def test_another_task_leaves_nothing_of_the_old_one():
    name = "cifar10-resnet18-kd-mbls"
    assert loaded(name).method == KD(task=MbLS(margin=6))
    assert recipes.load(name, ["method.task.alpha=.3"]).method.task == MbLS(margin=6, alpha=0.3)
    assert recipes.load(name, ["method.task.name=baseline"]).method.task == Baseline()
    assert recipes.load(name, ["method.task={name: mbls}"]).method.task == MbLS(margin=6)
    other = recipes.load(name, ["method.name=kd", "method.teachers=[a, b]"])
    assert other.method == KD(teachers=("a", "b"), task=MbLS(margin=6))


def test_every_field_is_described():
    def undescribed(section, path=""):
        for name, field in section.model_fields.items():
            yield from [] if field.description else [path + name]
            for inner in [field.annotation, *getattr(field.annotation, "__args__", ())]:
                if hasattr(inner, "model_fields"):
                    yield from undescribed(inner, f"{path}{name}.")

    assert list(undescribed(Config)) == []


def test_extends_merges_sections_and_replaces_the_rest(tmp_path):
    (tmp_path / "base.yaml").write_text(
        "data: {batch_size: 7, mean: [.1, .2, .3]}\ntrain: {epochs: 3}"
    )
    (tmp_path / "top.yaml").write_text(
        "extends: base.yaml\ndescription: x\ndata: {mean: [.4, .5, .6]}"
    )
    config = recipes.load(str(tmp_path / "top.yaml"))
    assert config.data.batch_size == 7
    assert config.data.mean == (0.4, 0.5, 0.6)
    assert config.train.epochs == 3


def test_a_field_that_is_a_mapping_is_replaced(tmp_path):
    (tmp_path / "base.yaml").write_text("data: {noise: {rate: .2, mapping: {1: 2, 3: 4}}}")
    (tmp_path / "top.yaml").write_text("extends: base.yaml\ndata: {noise: {mapping: {5: 6}}}")
    noise = recipes.load(str(tmp_path / "top.yaml")).data.noise
    assert (noise.rate, noise.mapping) == (0.2, {5: 6})
    set_to = recipes.load(str(tmp_path / "top.yaml"), ["data.noise.mapping={7: 8}"])
    assert set_to.data.noise.mapping == {7: 8}


def test_every_field_that_is_a_mapping_is_known_as_one():
    def mappings(section):
        for name, field in section.model_fields.items():
            kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
            yield from [name] if any(getattr(k, "__origin__", k) is dict for k in kinds) else []
            for inner in kinds:
                if hasattr(inner, "model_fields"):
                    yield from mappings(inner)

    assert set(mappings(Config)) == set(compose.WHOLE)


def test_a_file_may_extend_a_named_recipe(tmp_path):
    (tmp_path / "mine.yaml").write_text("extends: cifar10-resnet18\ntrain: {epochs: 2}")
    mine = recipes.load(str(tmp_path / "mine.yaml"))
    assert mine.train.epochs == 2
    assert mine.model == recipes.load("cifar10-resnet18").model


def test_set_overrides_any_field():
    config = recipes.load(
        "digits",
        ["data.batch_size=32", "data.noise.rate=1e-1", "data.noise.kind=symmetric", "train.seed=5"],
    )
    assert (config.data.batch_size, config.data.noise.rate, config.train.seed) == (32, 0.1, 5)
    assert config.data.noise.kind == "symmetric"
    assert recipes.load("digits", ["augment.scale=[.2, .9]"]).augment.scale == (0.2, 0.9)
    assert recipes.load("digits", ["data.noise.mapping={3: 5}"]).data.noise.mapping == {3: 5}
    assert recipes.load(
        "digits", ["data.progressive={end_epoch: 9, resolution: 4}"]
    ).data.progressive


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("data.batchsize=3", "data.batchsize is not a field .* did you mean batch_size"),
        ("zzz.lr=3", "zzz is not a field .* known here are data, augment"),
        ("method.gama=.9", "method.gama is not a field .* did you mean gamma"),
        ("method.gamma=2", r"method.gamma is 2: .* less than or equal to 1 \(discount γ"),
        ("method.name=foo", 'method.name is "foo": give one of baseline, dps'),
        ("method=3", "method is 3: should be an object"),
        ("method={name: kd, task: {name: te}}", 'method.task.name is "te": give one of baseline'),
        ("method={name: kd, task: {s: 1}}", "method.task.s is not a field .* known here are name"),
        ("method={name: kd, task: {name: ls, s: 2}}", r"method.task.s is 2: .* \(share of the t"),
        ("method={name: kd, task: 3}", "method.task is 3: should be"),
        ("method=&a {name: kd, task: *a}", "it holds what no field can be"),
        ("launch.workers=0", "launch.workers is 0: give a number such as 2, or 1:4"),
        ("launch.workers=3:2", "launch.workers is '3:2': give a number such as 2, or 1:4"),
        ("data.batch_size=0", "data.batch_size is 0: should be greater than or equal to 1"),
        ("data.batch_size=abc", 'data.batch_size is "abc": should be a valid integer .images a'),
        ("data.batch_size=true", "data.batch_size is true: should be a valid integer"),
        ("data.batch_size=1.5", "data.batch_size is 1.5"),
        ("data.noise.rate=1.01", "data.noise.rate is 1.01: should be less than or equal to 1"),
        ("data.noise.rate=.nan", "data.noise.rate is NaN: should be a finite number"),
        ("data.noise.kind=sym", "data.noise.kind is \"sym\": should be 'none', 'symmetric'"),
        ("data.noise.rat=1", "data.noise.rat is not a field .* did you mean rate"),
        ("data.mean=[1, 2]", r"data.mean.2 is \[1, 2\]: Field required"),
        ("data.std=[0, 1, 1]", r"data.std is \[0.0, 1.0, 1.0\]: every entry must be above 1e-6"),
        ("augment.scale=[1, .5]", r"augment.scale is \[1.0, 0.5\]: it must ascend"),
        (
            "data.progressive={resolution: 4, start_epoch: 5, end_epoch: 5}",
            "data.progressive.end_epoch is 5: give more than start_epoch",
        ),
        (
            "data.progressive={resolution: 9, end_epoch: 5}",
            "data.progressive.resolution is 9: give at most data.resolution, 8",
        ),
        ("data.mean=&a [*a]", "it holds what no field can be"),
        ("data={2020-01-01: 3}", "it holds what no field can be"),
        ("data.path=!!set {a}", "it holds what no field can be"),
        ("data.path=!!binary aGVq", "it holds what no field can be"),
        ("data.path=" + "[" * 3000, "not valid YAML"),
        ("data.path=\0", "not valid YAML"),
        ("train.seed=" + "9" * 30, "train.seed is 9+"),
        ("data.resolution=200000", "data.resolution is 200000: should be less than"),
        ("data=3", "data is 3: should be an object"),
        ("data.batch_size", "write it as section.field=value"),
        (".=3", "write it as section.field=value"),
        ("data.mean=[}", "not valid YAML at line 1"),
        ("data.source=2024-01-01", None),
    ],
)
def test_a_wrong_setting_gets_its_sentence(setting, said):
    if said is None:  # a date is text where text is asked for
        assert recipes.load("digits", [setting]).data.source == "2024-01-01"
        return
    with pytest.raises(InputError, match=said) as caught:
        recipes.load("digits", [setting])
    assert "\n" not in str(caught.value)


def test_another_method_leaves_nothing_of_the_old_one():
    assert recipes.load("digits", ["method.c=5", "method.gamma=.5"]).method == DPS(c=5, gamma=0.5)
    other = recipes.load("digits", ["method.c=5", "method.name=baseline"])
    assert other.method == Baseline()
    assert recipes.load("digits", ["method.c=5", "method.name=dps"]).method.c == 5


def test_numbers_with_a_colon_are_no_sexagesimals():
    assert recipes.load("digits", ["launch.workers=1:2"]).launch.worker_range == (1, 2)
    assert recipes.load("digits", ["launch.workers=3"]).launch.worker_range == (3, 3)
    assert recipes.load("digits", ["train.seed=0x10"]).train.seed == 16


def test_two_wrong_fields_are_both_named():
    with pytest.raises(InputError, match=r"data.batch_size is 0.*; train.epochs is 0"):
        recipes.load("digits", ["data.batch_size=0", "train.epochs=0"])


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"a.yaml": "extends: a.yaml"}, "a.yaml extends itself"),
        ({"a.yaml": "extends: b.yaml", "b.yaml": "extends: a.yaml"}, "extends itself .*b.yaml →"),
        ({"a.yaml": "extends: ../{here}/a.yaml"}, "extends itself"),
        ({"a.yaml": "extends: nothere"}, "recipe nothere does not exist"),
        ({"a.yaml": "extends: digit"}, "did you mean digits"),
        ({"a.yaml": "extends: [digits]"}, r"extends is \['digits'\]: give the name of one"),
        ({"a.yaml": "- 1"}, "a recipe is a mapping"),
        ({"a.yaml": "extends: digits-sym2"}, "sym2 is not a part: did you mean sym20"),
        ({"a.yaml": "method: {name: [te]}"}, "method.name is .* give one of baseline"),
        ({"a.yaml": "with: 3"}, "a.yaml: with holds 3: give parts and their fields, such as"),
        ({"a.yaml": "with: {te: 3}"}, "a.yaml: with holds 'te': give parts and their fields"),
        ({"a.yaml": "with: {te+x: {}}"}, r"with holds 'te\+x': x is not a part: the parts are"),
        ({"a.yaml": "with: {te+dsp: {}}"}, "dsp is not a part: did you mean dps"),
        ({"a.yaml": "with: {dps: {x: 1}}"}, "x is not a field of the configuration"),
        ({"a.yaml": "with: {dps: &x {data: *x}}"}, "a.yaml: it holds what no field can be"),
        ({"a.yaml": "part: [a]\nwith: {dps: {}}"}, r"a.yaml: part is \['a'\]: remove it; parts"),
        ({"a.yaml": "part: foo"}, "a.yaml: part is 'foo': remove it; parts are named in extends"),
        ({"a.yaml": "data: [:"}, "not valid YAML"),
        ({"a.yaml": "data: !!python/object/apply:os.getcwd []"}, "not valid YAML"),
        ({}, "a.yaml does not exist"),
    ],
)
def test_a_wrong_recipe_gets_its_sentence(tmp_path, files, said):
    for name, text in files.items():
        (tmp_path / name).write_text(text.replace("{here}", tmp_path.name))
    with pytest.raises(InputError, match=said):
        recipes.load(str(tmp_path / "a.yaml"))


def test_a_recipe_that_is_no_text_gets_its_sentence(tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"data: \xff\xfe")
    with pytest.raises(InputError, match="not a text file"):
        recipes.load(str(tmp_path / "a.yaml"))


def test_a_config_cannot_be_changed_by_mistake():
    with pytest.raises(ValueError, match="frozen"):
        recipes.load("digits").data.batch_size = 3

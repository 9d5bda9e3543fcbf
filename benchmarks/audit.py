"""Finding wrong labels: `dps audit` after one run, beside cleanlab with its out-of-sample protocol.

    python benchmarks/audit.py [--quick] [--cifar10 data/cifar10] [--images 4000]

Labels are redrawn (20% and 40% symmetric, 40% asymmetric); who finds them? DPS trains once, and its
evidence ranks the samples. cleanlab is given the predictions of a plainly trained model for samples
that it did not see: five folds, five trainings of the same model on 4/5 of the data.
What either costs is CPU time.
Needs cleanlab: pip install 'dps_dist[bench]'.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from dps_dist import recipes
from dps_dist.config import Config
from dps_dist.data.hold_out import Split
from dps_dist.data.loader import eval_loader, noisy_labels
from dps_dist.data.manifest import read
from dps_dist.data.sources import open_source
from dps_dist.data.write import ImageOptions, write_split
from dps_dist.report.audit import ranking_quality, score
from dps_dist.train.loop import epoch
from dps_dist.train.measure import held_out_logits
from dps_dist.train.setup import Training, build
from dps_dist.train.storage import Storage
from figures import found

DIGIT_PAIRS = "{7: 1, 2: 7, 5: 6, 3: 8, 4: 9}"  # classes that look alike
NOISES = {
    "20% symmetric": "{kind: symmetric, rate: .2}",
    "40% symmetric": "{kind: symmetric, rate: .4}",
    "40% asymmetric": "{kind: asymmetric, rate: .4}",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="digits, one noise, half as long, 2 folds"
    )
    parser.add_argument("--cifar10", type=Path, help="folder of prepared CIFAR-10")
    parser.add_argument("--images", type=int, default=4000, help="of CIFAR-10, a random part")
    parser.add_argument("--epochs", type=int, default=20, help="on CIFAR-10")
    asked = parser.parse_args()
    torch.set_num_threads(2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    noises = dict(list(NOISES.items())[1:2]) if asked.quick else NOISES
    folds, epochs = (2, 20) if asked.quick else (5, 40)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        compare("digits", of_digits(folder, epochs), noises, folder, folds)
        if asked.cifar10 is not None:
            compare("CIFAR-10", of_cifar(asked), noises, folder, folds, asked.images)
    dist.destroy_process_group()


def of_digits(folder: Path, epochs: int) -> list[str]:
    for split in ("train", "val"):
        source = open_source("digits", None, split)
        write_split(
            source, folder / "data", split, {"source": "digits"}, ImageOptions("raw"), workers=1
        )
    return [f"data.path={folder / 'data'}", f"train.epochs={epochs}", "method.tau=.8"]


def of_cifar(asked: argparse.Namespace) -> list[str]:
    """A small network, c so that the prior weighs ½ at two fifths of training as in the paper."""
    return [
        f"data.path={asked.cifar10}",
        "data.source=cifar10",
        "data.resolution=32",
        "data.batch_size=64",
        "augment={crop: pad, pad: 4, flip: true}",
        f"train.epochs={asked.epochs}",
        "method={gamma: .85, c: 20, tau: .8}",
    ]


def compare(
    name: str,
    settings: list[str],
    noises: dict[str, str],
    scratch: Path,
    folds: int,
    images: int | None = None,
) -> None:
    for kind, noise in noises.items():
        asymmetric = name == "digits" and "asymmetric" in kind
        given = noise[:-1] + f", mapping: {DIGIT_PAIRS}}}" if asymmetric else noise
        chosen = [*settings, f"data.noise={given}", "launch.workers=1"]
        config = recipes.load("digits", chosen)
        data = read(config.data.path, "train")
        part = some(len(data), images)
        labels, clean = noisy_labels(config.data, data), np.asarray(data.clean_labels)
        wrong = (labels != clean)[part]

        start = time.process_time()
        ours = score_of_dps(config, part, labels, scratch)
        seconds = time.process_time() - start
        start = time.process_time()
        plain = recipes.load("digits", [*chosen, "method={name: baseline}"])
        theirs = score_of_cleanlab(plain, part, labels, scratch, folds)
        their_seconds = time.process_time() - start
        auroc, precision = ranking_quality(wrong, ours)
        their_auroc, their_precision = ranking_quality(wrong, theirs)
        found(
            f"AUROC of `dps audit` after one run, {name}, {kind} noise ({wrong.mean():.0%} of "
            f"{len(part):,} labels are wrong), beside cleanlab's with {folds} folds",
            auroc,
            "{:.4f}",
            at_least=their_auroc,
            note=f"AP {precision:.3f} beside {their_precision:.3f}; {seconds:.0f} s of CPU beside "
            f"{their_seconds:.0f} s",
        )


def some(num_samples: int, count: int | None) -> NDArray[np.int32]:
    drawn = np.random.default_rng(0).permutation(num_samples)[: count or num_samples]
    return np.sort(drawn).astype(np.int32)


def score_of_dps(
    config: Config, part: NDArray[np.int32], labels: NDArray[np.int64], scratch: Path
) -> NDArray[np.float64]:
    training = trained(config, part, scratch)
    assert training.targets is not None
    evidence = training.targets.evidence(torch.from_numpy(part).long()).double()
    return np.asarray(score(evidence, torch.from_numpy(labels[part])))


def score_of_cleanlab(
    config: Config, part: NDArray[np.int32], labels: NDArray[np.int64], scratch: Path, folds: int
) -> NDArray[np.float64]:
    from cleanlab.rank import get_label_quality_scores

    probabilities: dict[int, NDArray[Any]] = {}
    dealt = np.random.default_rng(1).permutation(part)
    for fold in range(folds):
        held_out = np.sort(dealt[fold::folds])
        training = trained(config, np.setdiff1d(part, held_out).astype(np.int32), scratch)
        training.split = Split(training.split.trained, held_out.astype(np.int32))
        training.held_out_loader = eval_loader(config, training.train_set, threads=2)
        logits, _ = held_out_logits(training)
        probabilities |= dict(zip(held_out.tolist(), logits.softmax(-1).numpy(), strict=True))
    predicted = np.stack([probabilities[sample] for sample in part.tolist()])
    return np.asarray(1 - get_label_quality_scores(labels[part], predicted))


def trained(config: Config, part: NDArray[np.int32], scratch: Path) -> Training:
    """A run on some samples, without evaluation or checkpoints."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    last = config.train.epochs
    seldom = config.model_copy(
        update={
            "evaluate": config.evaluate.model_copy(update={"every_epochs": last}),
            "train": config.train.model_copy(
                update={
                    "checkpoint": config.train.checkpoint.model_copy(update={"every_epochs": last})
                }
            ),
        }
    )
    training = build(seldom, Storage(folder), lambda event: None, threads=2)
    training.split = Split(part, None)
    steps = len(part) // config.data.batch_size
    training.schedule = torch.optim.lr_scheduler.OneCycleLR(
        training.optimizer, max_lr=config.optim.lr, total_steps=steps * last + 1
    )
    while training.at.epoch < last:
        epoch(training)
    training.writer.wait()
    return training


if __name__ == "__main__":
    main()

"""A run's state into checkpoints and back, and the files that a person reads in its folder."""

import json
import tempfile
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor

from dps_dist.errors import InputError
from dps_dist.train import recall
from dps_dist.train.checkpoint import Opened, open_checkpoint
from dps_dist.train.files import METRICS, SUMMARY
from dps_dist.train.manifest import TARGETS, newest_whole
from dps_dist.train.setup import Training
from dps_dist.train.trained import check_data, labels_sum, names_sum

MEASURED = ("accuracy", "top5", "nll", "ece", "temperature", "nll_ts", "ece_ts")  # of the model


def save(training: Training) -> None:
    """Hand a copy of everything to the writer, which commits it while training goes on."""
    training.writer.wait()  # or memory would hold two copies while the save before is written
    training.watch.check_weights(training.model)
    sums, recalled = training.watch.state(), recall.saved(training)
    state = None
    if training.peers.rank == 0:
        state = _copied(
            {
                "model": training.model.state_dict(),
                "optimizer": training.optimizer.state_dict(),
                "schedule": training.schedule.state_dict(),
                "scaler": training.scaler.state_dict(),
                "ema": training.ema.state_dict() if training.ema is not None else None,
                "method": training.method.state_dict(),
                "recall": recalled,
                "sums": sums,
                "data": _data(training),
                "history": training.history,
            }
        )
    rows = training.targets.snapshot() if training.targets is not None else None
    measured = training.history[-1] if training.at.position == 0 else {}
    accuracy = measured.get("accuracy")
    training.writer.save(training.at, state, rows, accuracy)
    training.watch.saved()


def record(training: Training, figures: dict[str, Any]) -> None:
    """An epoch's row of figures: into the history, its file, and to whoever listens."""
    training.history.append(figures)
    if training.peers.rank == 0:
        _write_metrics(training)
        training.tell({"kind": "epoch", **figures})


def restore(training: Training) -> None:
    """Go on from the newest whole checkpoint, if there is one; saved by any number of ranks."""
    peers = training.peers
    if peers.rank == 0:
        training.storage.tidy()
    found = newest_whole(training.storage, training.note, peers)
    if found is not None:
        training.writer.vouch(found.name)
        with tempfile.TemporaryDirectory(prefix="dps-") as scratch:
            share = peers.rank, peers.world_size
            opened = open_checkpoint(training.storage, found.name, Path(scratch), share=share)
            _check_shards(training, opened)
            _load(training, opened.state)
            training.at = opened.moment
            if training.targets is not None:
                training.targets.load(opened.folder / TARGETS, verified=True)
    _tell_start(training)
    if peers.rank == 0:
        _write_metrics(training)


def _check_shards(training: Training, opened: Opened) -> None:
    """Refuse to go on in mid-epoch where other shards were begun."""
    other = opened.world_size != training.peers.world_size
    if other and training.config.data.shuffle == "shard" and opened.moment.position:
        raise InputError(
            f"data.shuffle is shard and {opened.folder.name} was saved in mid-epoch by "
            f"{opened.world_size} workers: resume with --workers {opened.world_size}"
        )


def finish(training: Training) -> dict[str, Any]:
    """The final targets and the summary, when all is committed."""
    training.writer.wait()
    if training.targets is not None:
        _save_targets(training)
    rows = training.history
    best = max((row for row in rows if "accuracy" in row), key=lambda row: row["accuracy"])
    measured = (*MEASURED, "target_entropy", "label_agreement", "recovered")
    summary = {
        "run": training.storage.name,
        "folder": str(training.storage),
        "method": training.config.method.name,
        "epochs": training.at.epoch,
        "steps": training.at.step,
        **{key: rows[-1][key] for key in measured if key in rows[-1]},
        "best_accuracy": best["accuracy"],
        "best_epoch": best["epoch"],
        "train_loss": rows[-1]["train_loss"],
        "images_per_s": median(row["images_per_s"] for row in rows),  # the first one compiles
        "seconds": sum(row["seconds"] for row in rows),
        "workers": training.peers.world_size,
        **_data(training),
    }
    if training.peers.rank == 0:
        training.storage.write(SUMMARY, as_json(summary))
        training.tell({"kind": "end", **summary})
    return summary


def _data(training: Training) -> dict[str, int]:
    """What tells the training data from other data."""
    return {
        "samples": len(training.train_set),
        "classes": training.train_set.num_classes,
        "sum of labels": labels_sum(training.labels),
        "sum of class names": names_sum(training.train_set),
    }


def _load(training: Training, state: dict[str, Any]) -> None:
    check_data(training.storage, training.train_set, state["data"], _data(training))
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    training.schedule.load_state_dict(state["schedule"])
    training.scaler.load_state_dict(state["scaler"])
    if training.ema is not None:
        training.ema.load_state_dict(state["ema"])
    training.method.load_state_dict(state["method"])
    training.watch.restore(state["sums"])
    training.history = state["history"]
    training.recall = recall.restored(training, state.get("recall"))


def _write_metrics(training: Training) -> None:
    """A line an epoch. Written anew each time: whole at any moment, and right after going back."""
    lines = "".join(json.dumps(finite(row), allow_nan=False) + "\n" for row in training.history)
    training.storage.write(METRICS, lines.encode())


def finite(value: Any) -> Any:
    """JSON has no NaN: what is not finite, however deep, is null there."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def as_json(content: Any) -> bytes:
    """For a file that people read, too."""
    text = json.dumps(finite(content), indent=1, allow_nan=False, ensure_ascii=False)
    return f"{text}\n".encode()


def _save_targets(training: Training) -> None:
    assert training.targets is not None
    storage = training.storage
    if training.peers.rank == 0:
        storage.remove(TARGETS)  # of a start of this run that was killed while writing them
    training.peers.barrier()
    with tempfile.TemporaryDirectory(prefix="dps-") as scratch:
        folder = (storage.local or Path(scratch)) / TARGETS
        of_classes = training.targets.prior.num_classes == training.train_set.num_classes
        training.targets.save(folder, labels=training.labels if of_classes else None)
        if storage.local is None:
            storage.upload(folder, TARGETS)
    training.peers.barrier()  # the summary, which says that all is there, comes after


def _tell_start(training: Training) -> None:
    hosts = training.peers.hosts()
    if training.peers.rank:
        return
    config, at = training.config, training.at
    training.tell(
        {
            "kind": "start",
            "run": training.storage.name,
            "method": config.method.name,
            "model": config.model.name,
            "workers": training.peers.world_size,
            "hosts": hosts,
            "device": str(training.peers.device),
            "samples": len(training.train_set),
            "classes": training.train_set.num_classes,
            "parameters": sum(p.numel() for p in training.model.parameters()),
            "batch_size": config.data.batch_size,
            "steps": training.steps_per_epoch,
            "epochs": config.train.epochs,
            "epoch": at.epoch,
            "step": at.step,
        }
    )


def _copied(value: Any) -> Any:
    """Tensors cloned to the CPU, in whatever they are nested."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(entry) for entry in value)
    return value

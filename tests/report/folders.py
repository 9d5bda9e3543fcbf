"""Run folders for the tests of the report: made-up figures in the form that runs leave them."""

import io
import json
import sys
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import yaml
from PIL import Image

from dps_dist.recipes import resolve
from dps_dist.report.audit import suggestions

NASTY = '<img src=x onerror=alert(1)> $\\frac$ "& \N{SNOWMAN} _c'
VERSIONS = {"dps_dist": "0.1.0", "python": "3.11.7", "torch": "2.15.0", "revision": "3f9c2ab"}


def epoch(k, **changes):
    row = {
        "epoch": k, "step": 18 * k, "lr": 0.008, "train_loss": 2 / k, "train_accuracy": 0.58,
        "accuracy": 0.9 + k / 1000, "top5": 0.999, "nll": 0.4 - k / 100, "ece": 0.2 / k,
        "images_per_s": 5000.0 + k, "seconds": 0.3, "workers": 2,
    }  # fmt: skip
    return {key: value for key, value in (row | changes).items() if value is not None}


def write_run(folder, epochs, name=None, finished=True, config=None, run=None):
    folder.mkdir(parents=True)
    fields = resolve({"method": {"name": "dps"}, **(config or {})}, where="test").model_dump(
        mode="json"
    )
    about = {"name": name or folder.name, "created": "2026-11-16T11:40:12Z", **VERSIONS}
    about |= {"command": f"dps train digits --name '{name or folder.name}'", **(run or {})}
    (folder / "config.yaml").write_text(yaml.safe_dump({**fields, "run": about}, sort_keys=False))
    lines = [json.dumps(row) + "\n" for row in epochs]
    (folder / "metrics.jsonl").write_text("".join(lines))
    if finished:
        last = {
            key: epochs[-1].get(key) for key in ("accuracy", "ece", "nll", "top5", "images_per_s")
        }
        summary = {
            "run": folder.name,
            "folder": str(folder),
            "method": "dps",
            "seconds": 12.0,
            **last,
        }
        summary |= {"best_accuracy": 0.9876, "best_epoch": 3, "epochs": len(epochs)}
        if "recovered" in epochs[-1]:
            summary["recovered"] = epochs[-1]["recovered"]
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def learning(k, of, rng, sharp=1.0):
    """An epoch as real ones are: noisy, and better in the end."""
    done = k / of
    return epoch(
        k,
        train_loss=0.6 + 1.6 * np.exp(-3 * done) + rng.normal(0, 0.01),
        accuracy=min(0.99, 0.97 - 0.45 * np.exp(-5 * done * sharp) + rng.normal(0, 0.012)),
        nll=0.25 + 1.8 * np.exp(-4 * done) + abs(rng.normal(0, 0.04)),
        ece=0.05 + 0.4 * np.exp(-4 * done) + abs(rng.normal(0, 0.015)),
        target_entropy=0.9 * (1 - np.exp(-6 * done)),
        label_agreement=1 - 0.36 * (1 - np.exp(-5 * done)),
        recovered=0.95 * (1 - np.exp(-5 * done)),
    )


def evaluation(classes=10, *, seed=0, scaled=True, names=None, on=True, samples=597, **changes):
    """The facts that `dps evaluate` writes."""
    rng = np.random.default_rng(seed)
    base = {
        "nll": 0.28 + seed / 100, "brier": 0.052, "ece": 0.173, "ece_10": 0.171,
        "sce": 0.0412, "ace": 0.1691,
    }  # fmt: skip
    figures = {"accuracy": 0.9732 - seed / 100, "top5": 0.9987, **base}
    facts = {
        "run": "dps",
        "epoch": 5,
        "split": "val",
        "samples": samples,
        "class_names": names or [str(k) for k in range(classes)],
        "figures": figures,
        "reliability": bins(samples, rng, -0.17),
        "delta": delta(samples, rng, seed),
        "ta_kl": {"epochs": [1, 2, 3, 4, 5], "value": [1.9, 0.9, 0.4, 0.11, 0.0]},
    }
    if scaled:
        facts["temperature"] = 1.314
        facts["figures"] |= {f"{key}_ts": value * 0.61 for key, value in base.items()}
        facts["reliability_ts"] = bins(samples, rng, -0.03)
    if classes >= 3:
        facts["projection"] = {"similar": {"classes": [0, 2, 1]}}
        facts["projection"]["dissimilar"] = {"classes": [0, 1, 2]}
    if on:
        facts["on"] = elsewhere(rng)
    return facts | changes


def bins(samples, rng, gap):
    edges = np.linspace(0, 1, 16)
    share = edges[1:] ** 3 * rng.uniform(0.7, 1.3, 15)
    share[:3] = 0
    count = np.floor(samples * share / share.sum()).astype(int)
    confidence = (edges[:-1] + edges[1:]) / 2
    accuracy = np.clip(confidence - gap * (1.1 - confidence) * 3, 0, 1)
    some = count > 0
    return {
        "edges": edges.tolist(),
        "count": count.tolist(),
        "accuracy": [float(a) if s else None for a, s in zip(accuracy, some, strict=True)],
        "confidence": [float(c) if s else None for c, s in zip(confidence, some, strict=True)],
    }


def delta(samples, rng, seed):
    values = 2 * rng.beta(1.5 + seed, 5, samples)
    count, edges = np.histogram(values, 50, (0, 2))
    return {"edges": edges.tolist(), "count": count.tolist(), "mean": float(values.mean())}


CORRUPTIONS = ("gaussian_noise", "fog", "frost", "jpeg_compression", "zoom_blur")


def elsewhere(rng):
    falling = {
        name: [round(0.94 - 0.09 * s * rng.uniform(0.3, 1), 4) for s in range(5)]
        for name in CORRUPTIONS
    }
    return {
        "cifar10-c": {
            "kind": "corruptions",
            "accuracy": float(np.mean(list(falling.values()))),
            "by_corruption": falling,
            "ece_by_severity": [0.03, 0.05, 0.08, 0.13, 0.21],
        },
        "cifar10-p": {
            "kind": "perturbations",
            "mfp": 0.0612,
            "by_perturbation": {"tilt": 0.0345, "shot_noise": 0.0789},
        },
        "svhn": {"kind": "ood", "samples": 26032, "auroc": 0.9414},
        "scanned": {"kind": "labelled", "samples": 88, "figures": {"accuracy": 0.8125, "ece": 0.2}},
    }


def arrays(classes=10, *, seed=0, samples=100):
    """What evaluation.npz holds."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, (classes, classes)) + 9 * np.eye(classes)
    mu = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    held = {"mu": mu.astype(np.float32)}
    if classes >= 3:
        corners = np.array([[0, 0], [3, 0.4], [1.2, 3]])
        of_class = np.repeat([0, 1, 2], samples)
        for kind, spread in (("similar", 0.7), ("dissimilar", 0.35)):
            points = corners[of_class] + rng.normal(0, spread, (len(of_class), 2))
            held[kind], held[f"{kind}_class"] = points.astype(np.float32), of_class
    return held


def evaluate(folder, facts=None, held=None):
    (folder / "evaluation.json").write_text(json.dumps(evaluation() if facts is None else facts))
    np.savez(folder / "evaluation.npz", **(arrays() if held is None else held))
    return folder


def rows(count=5, seed=0):
    rng = np.random.default_rng(seed)
    return [learning(k, count, rng) for k in range(1, count + 1)]


def audit_stand_ins(monkeypatch):
    """Stand-ins for the audit: three samples, one of which agrees with its label."""
    columns = {
        "index": [1234, 7, 3],
        "path": [NASTY, "b.png", "c.png"],
        "label": [1, 2, 3],
        "label_name": ["one", "two", "three"],
        "suggested": [7, 0, 3],
        "suggested_name": [NASTY, "zero", "three"],
        "label_evidence": [0.0123, 0.2, 0.9],
        "suggested_evidence": [0.912, 0.5, 0.9],
        "entropy": [0.1, 0.2, 0.3],
        "visits": [5, 5, 5],
        "score": [0.9877, 0.8, 0.1],
    }
    asked = []

    def pictures(data, split, samples, side=None):
        asked.append((data.path, split, list(samples), side))
        return [_png() for _ in samples]

    ranked = SimpleNamespace(rank=lambda run: pa.table(columns), suggestions=suggestions)
    monkeypatch.setitem(sys.modules, "dps_dist.report.audit", ranked)
    pictured = SimpleNamespace(pictures=pictures)
    monkeypatch.setitem(sys.modules, "dps_dist.data.pictures", pictured)
    return asked


def _png(side=64):
    stream = io.BytesIO()
    Image.new("RGB", (side, side), (200, 30, 30)).save(stream, "PNG")
    return stream.getvalue()

"""A run's metrics for Prometheus, through Ray, which adds `ray_` to their names.

Each worker has a `RankTelemetry`, and whoever follows the run a `RunTelemetry`. What they hear they
only note; a thread tells Ray, once a second.
"""

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from types import TracebackType
from typing import Any, Literal

from ray.util.metrics import Counter, Gauge

from dps_dist.train.vitals import Vitals

REFRESH_S = 1.0  # Ray drops a gauge that is not set again; it reports every 10 s, or 1 s at most


@dataclass(frozen=True)
class Metric:
    name: str
    kind: Literal["gauge", "counter"]
    meaning: str
    by: str | None = None  # a label beside run and rank

    @property
    def exported(self) -> str:
        """Its name in Prometheus."""
        return f"ray_{self.name}" + ("_total" if self.kind == "counter" else "")


OF_EACH_RANK = (
    Metric("dps_epoch", "gauge", "epochs done, with the fraction of the one under way"),
    Metric("dps_epochs", "gauge", "epochs that the run is to have"),
    Metric("dps_loss", "gauge", "mean training loss of the rank's steps since the last look"),
    Metric("dps_images", "counter", "images trained on; its rate is images/s"),
    Metric("dps_steps", "counter", "steps"),
    Metric("dps_seconds", "counter", "where the rank's time went", by="part"),
    Metric("dps_store_bytes", "gauge", "bytes of the rank's targets, bookkeeping included"),
    Metric("dps_look_timestamp_seconds", "gauge", "when the rank last was seen to make steps"),
    Metric(
        *("dps_checkpoint_timestamp_seconds", "gauge"),
        "when what the last committed checkpoint holds was reached, or this start: what was done "
        "since then would be lost",
    ),
)
OF_AN_EPOCH = (  # told on rank 0; the names are keys of metrics.jsonl
    Metric("dps_accuracy", "gauge", "accuracy on the evaluation split"),
    Metric("dps_ece", "gauge", "expected calibration error there, 15 bins"),
    Metric("dps_target_entropy", "gauge", "mean entropy of the targets, nats"),
    Metric("dps_prior_weight", "gauge", "mean share of the prior in the targets"),
    Metric(
        *("dps_label_disagreement", "gauge"),
        "share of samples whose evidence is not greatest at their label",
    ),
)
OF_THE_RUN = (
    Metric("dps_workers", "gauge", "workers that the run was last started with"),
    Metric("dps_restarts", "gauge", "times that workers were started again under this `dps train`"),
    Metric("dps_ended", "gauge", "1 for a moment when the run ends", by="how"),
)
METRICS = (*OF_EACH_RANK, *OF_AN_EPOCH, *OF_THE_RUN)


class Exporter:
    """Holds the newest value of each metric, and keeps telling Ray."""

    def __init__(self, metrics: Iterable[Metric], tags: dict[str, str]) -> None:
        self._metrics = {metric.name: metric for metric in metrics}
        self._told = {metric.name: _instrument(metric, tags) for metric in metrics}
        self._noted: dict[tuple[str, str], float] = {}
        self._counted: dict[tuple[str, str], float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_telling, name="telemetry", daemon=True)
        self._thread.start()

    def note(self, name: str, value: float, by: str = "") -> None:
        """Of a counter, what it has come to. Ray does not carry what is not finite."""
        if isfinite(value):
            self._noted[name, by] = value

    def close(self) -> None:
        """Tell the last values, and no more: gauges are gone about 20 s later."""
        self._stop.set()
        self._thread.join()

    def _keep_telling(self) -> None:
        while not self._stop.wait(REFRESH_S):
            self._tell()
        self._tell()

    def _tell(self) -> None:
        for (name, by), value in self._noted.copy().items():
            metric, told = self._metrics[name], self._told[name]
            tags = {metric.by: by} if metric.by else {}
            if isinstance(told, Gauge):
                told.set(value, tags)
            elif (more := value - self._counted.get((name, by), 0.0)) > 0:
                told.inc(more, tags)
                self._counted[name, by] = value


class RankTelemetry(Exporter):
    """In a worker: how it is doing and, on rank 0, what an epoch ended with."""

    def __init__(self, run: str, rank: int) -> None:
        super().__init__((*OF_EACH_RANK, *OF_AN_EPOCH), {"run": run, "rank": str(rank)})
        self.note("dps_look_timestamp_seconds", time.time())

    def see(self, vitals: Vitals) -> None:
        self.note("dps_look_timestamp_seconds", time.time())
        self.note("dps_checkpoint_timestamp_seconds", vitals.saved_at)
        for key in ("epoch", "epochs", "loss", "steps", "images", "store_bytes"):
            self.note(f"dps_{key}", getattr(vitals, key))
        for part, seconds in vitals.seconds.items():
            self.note("dps_seconds", seconds, by=part)

    def hear(self, event: Mapping[str, Any]) -> None:
        if event["kind"] != "epoch":
            return
        figures = {f"dps_{key}": value for key, value in event.items()}
        if "label_agreement" in event:
            figures["dps_label_disagreement"] = 1 - event["label_agreement"]
        for metric in OF_AN_EPOCH:
            if metric.name in figures:
                self.note(metric.name, figures[metric.name])


class RunTelemetry(Exporter):
    """Beside the display: how many workers there are to be, and how the run ends."""

    def __init__(self, run: str) -> None:
        super().__init__(OF_THE_RUN, {"run": run})
        self._starts, self._refusal = 0, ""

    def hear(self, event: Mapping[str, Any]) -> None:
        if event["kind"] == "start":
            self._starts += 1
            self.note("dps_workers", event["workers"])
            self.note("dps_restarts", self._starts - 1)
        elif event["kind"] == "refused":
            self._refusal = event["error"]

    def __enter__(self) -> "RunTelemetry":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        how = self._refusal or (kind.__name__ if kind else "finished")
        self.note("dps_ended", 1.0, by=how)
        self.close()


def _instrument(metric: Metric, tags: dict[str, str]) -> Gauge | Counter:
    kind = Gauge if metric.kind == "gauge" else Counter
    keys = (*tags, *((metric.by,) if metric.by else ()))
    instrument = kind(metric.name, metric.meaning, keys)
    instrument.set_default_tags(tags)
    return instrument

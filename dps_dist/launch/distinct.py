"""Optuna as Ray Tune's searcher, which `ray_tune.py` asks for points. An extra: needs `optuna`."""

from collections.abc import Sequence
from typing import Any

from optuna.trial import TrialState
from ray.tune.search.optuna import OptunaSearch

from dps_dist.launch import space as spaces
from dps_dist.launch.space import Point


class DistinctOptuna(OptunaSearch):
    """Chooses no point twice, which would be two trials in one run's folder: where Optuna would,
    one of `drawn` is tried. These are as many as there are trials, so that one is always left."""

    def __init__(self, drawn: Sequence[Point], **options: Any) -> None:
        super().__init__(**options)
        self._drawn, self._chosen = drawn, set[str]()

    def suggest(self, trial_id: str) -> Point | None:
        study: Any = self._ot_study
        while (point := super().suggest(trial_id)) and spaces.name(point) in self._chosen:
            study.tell(self._ot_trials.pop(trial_id), state=TrialState.FAIL)
            left = (one for one in self._drawn if spaces.name(one) not in self._chosen)
            study.enqueue_trial(next(left))
        if point:
            self._chosen.add(spaces.name(point))
        return point

"""Which checkpoints go when a new one is there; the `Writer` of rank 0 asks."""

import logging

from dps_dist import config
from dps_dist.errors import InputError
from dps_dist.train.manifest import (
    MANIFEST,
    DamagedError,
    Found,
    attempt_of,
    best_first,
    listed,
    step_of,
    verify,
)
from dps_dist.train.storage import Storage, sync

log = logging.getLogger(__name__)


class Pruning:
    """Keeps the newest `keep_last` and the best one, as far as they are whole.

    The one that was just committed stays, and so does what is ahead of it: a former attempt of the
    run may still be dying, and if each removed the other's newest, none would be left.
    """

    def __init__(self, checkpoints: Storage, keep: config.Checkpoint, attempt: str) -> None:
        self.checkpoints, self.keep, self.attempt = checkpoints, keep, attempt
        # Their unfinished folders are leftovers. One of our own may be the next, begun by a rank
        # that is ahead of this one, and one of whoever starts later is not ours to judge.
        self._former = {attempt_of(name) for name in checkpoints.names()} - {attempt}
        self.whole: dict[str, bool] = {}  # of former attempts, as far as it is known
        self._remove_leftovers()  # or kills before the first commit would fill the disk

    def after(self, newest: str) -> None:
        """Remove what is not to be kept now that `newest` is committed."""
        try:
            self._prune(newest)
        except OSError as error:  # it costs room and not the run
            log.warning("old checkpoints in %s stay: %s", self.checkpoints, error)

    def _prune(self, newest: str) -> None:
        self._remove_leftovers()
        entries = dict(listed(self.checkpoints))
        if newest not in entries:
            return
        behind = list(entries)[list(entries).index(newest) :]
        kept = self._kept([one for name in behind if isinstance(one := entries[name], Found)])
        for name in behind:
            # One of another release is neither damaged nor ours
            if name not in kept and not isinstance(entries[name], InputError):
                remove(self.checkpoints, name)

    def _remove_leftovers(self) -> None:
        for name in self.checkpoints.names():
            unfinished = not self.checkpoints.exists(f"{name}/{MANIFEST}")
            if step_of(name) is not None and unfinished and attempt_of(name) in self._former:
                remove(self.checkpoints, name)

    def _kept(self, newest_first: list[Found]) -> set[str]:
        last: list[str] = []
        for one in newest_first:
            if len(last) < self.keep.keep_last and self._is_whole(one):
                last.append(one.name)
        if not self.keep.keep_best:
            return set(last)
        best = next((one.name for one in best_first(newest_first) if self._is_whole(one)), None)
        return {*last, best} if best else set(last)

    def _is_whole(self, one: Found) -> bool:
        """Ours are. Those of former attempts are read, once, lest a damaged one takes a place."""
        if attempt_of(one.name) == self.attempt:
            return True
        if one.name not in self.whole:
            try:
                verify(self.checkpoints, one.name, one.files)
                self.whole[one.name] = True
            except DamagedError:
                self.whole[one.name] = False
        return self.whole[one.name]


def remove(checkpoints: Storage, name: str) -> None:
    """The manifest first: a kill in between leaves a folder that does not count, not damage."""
    try:
        checkpoints.remove(f"{name}/{MANIFEST}")
        if checkpoints.local is not None and (checkpoints.local / name).is_dir():
            sync(checkpoints.local / name)
        checkpoints.remove(name)
    except OSError as error:
        log.warning("%s could not be removed: %s", checkpoints / name, error)

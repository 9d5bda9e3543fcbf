"""FFCV's reading thread, which here can be stopped, hands on what went wrong in it, and is safe on
a GPU that lags behind. `loader.py` starts one an epoch.

On a GPU a batch is decoded into a pinned slot, copied on the slot's own stream and normalised on
the main one. FFCV makes streams wait for each other, never the host.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dps_dist.data.ffcv import EpochIterator
from dps_dist.data.mapped import MappedLoader
from dps_dist.data.order import PADDING


class EpochThread(EpochIterator):  # type: ignore[misc]
    """The batches of one rank's steps, read ahead: `next` until all are had, then `stop`."""

    error: BaseException | None = None
    stopped = False

    def __init__(self, loader: MappedLoader, by_step: NDArray[np.int32]) -> None:
        # FFCV cuts a flat order into equal batches; a rank's may be shorter by a sample
        steps = [step[step != PADDING].astype(np.int64) for step in by_step]
        self.steps = [samples for samples in steps if len(samples)]
        self._copied: dict[int, torch.cuda.Event] = {}  # by slot: when its last copy is done
        super().__init__(loader, np.concatenate([np.zeros(0, np.int64), *self.steps]))

    @property
    def _gpu_streams(self) -> list[torch.cuda.Stream]:
        """One a slot; none where there is no GPU."""
        return [stream for stream in self.cuda_streams if stream is not None]

    def start(self) -> None:
        """FFCV calls it when the buffers are there."""
        for stream in self._gpu_streams:
            # Their buffers may be memory that queued work of the main stream still reads
            stream.wait_stream(self.current_stream)
        super().start()

    def run(self) -> None:
        self.iter_ixes = iter(samples for samples in self.steps if not self.stopped)
        try:
            if self._gpu_streams:  # a thread begins on the first GPU, whatever its process uses
                torch.cuda.set_device(self.current_stream.device)
            super().run()
        except BaseException as error:  # it must reach the thread that waits for batches
            self.error = error
            self.output_queue.put(None)

    def run_pipeline(self, b_ix: int, batch_indices: Any, batch_slot: int, cuda_event: Any) -> Any:
        """Decode a batch into its slot and send it on."""
        if batch_slot in self._copied:  # the slot's last batch may not have left it yet
            self._copied[batch_slot].synchronize()
        result = super().run_pipeline(b_ix, batch_indices, batch_slot, cuda_event)
        if self._gpu_streams:
            # blocking: the thread sleeps, where it would otherwise keep a core busy with waiting
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._copied[batch_slot] = event
            event.record(self.cuda_streams[batch_slot])
        return result

    def __next__(self) -> Any:
        try:
            return super().__next__()
        except StopIteration:
            raise self.error or RuntimeError("FFCV delivered fewer batches than asked") from None

    def stop(self) -> None:
        self.stopped = True  # after the batch in work there is no further one
        while self.is_alive():
            while not self.output_queue.empty():
                self.output_queue.get_nowait()
            self.join(0.005)
        for stream in self._gpu_streams:  # the buffers of a copy under way must not be freed
            stream.synchronize()
        self.close()

"""The reading thread beside a GPU that is as late as it may be; the GPU is simulated."""

import threading
from collections import deque
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from dps_dist.data.decode import Crop, KeyedDecoder
from dps_dist.data.ffcv import ToDevice, ToTensor
from dps_dist.data.loader import Loader
from dps_dist.data.mapped import MappedLoader
from dps_dist.data.order import EpochOrder
from dps_dist.data.reading import EpochThread

CROP, ORDER = Crop("pad", flip=True, pad=2), EpochOrder(1200, 100, epoch=1)
LOCK = threading.RLock()


class Stream:
    """Work is queued, and done only when the host waits for it, or for what must come after it."""

    device = "the second GPU"

    def __init__(self):
        self.queue, self.queued, self.done = deque(), 0, 0

    def enqueue(self, work):
        with LOCK:
            self.queue.append(work)
            self.queued += 1

    def run(self, until):
        with LOCK:
            while self.done < until:
                self.queue.popleft()()
                self.done += 1

    def synchronize(self):
        self.run(self.queued)

    def wait_stream(self, other):
        event = Event()
        event.record(other)
        event.wait(self)


class Event:
    def __init__(self, blocking=False):
        pass

    def record(self, stream):
        self.stream, self.until = stream, stream.queued

    def wait(self, stream=None):
        (stream or torch.cuda.current_stream()).enqueue(self.synchronize)

    def synchronize(self):
        self.stream.run(self.until)


class LateCopy(ToDevice):
    """FFCV's copy to the device, from other memory, and as late as the stream allows."""

    def generate_code(self):
        def copy(pixels, copied):
            copied = copied[: len(pixels)]
            torch.cuda.current_stream().enqueue(lambda: copied.copy_(pixels))
            return copied

        return copy


@pytest.fixture
def gpu(monkeypatch):
    """The main stream, and the devices that threads were set to."""
    main, chosen, local = Stream(), [], threading.local()

    @contextmanager
    def within(stream):
        local.stream = stream
        yield
        local.stream = main

    monkeypatch.setattr("ffcv.loader.epoch_iterator.IS_CUDA", True)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: getattr(local, "stream", main))
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.append((device, threading.get_ident()))
    )
    return main, chosen


@pytest.fixture
def start(train_digits):
    """Starts the reading of ORDER, one batch ahead, so that there are three slots."""

    def start():
        decoder = KeyedDecoder(CROP, seed=5)
        image = [decoder, ToTensor(), LateCopy(torch.device("cpu"))]
        loader = MappedLoader(
            str(train_digits.beton),
            batch_size=ORDER.batch_size,
            num_workers=1,
            pipelines={"image": image, "label": None, "index": None},
            batches_ahead=1,
        )
        decoder.start_epoch(ORDER.epoch, 8)
        return EpochThread(loader, ORDER.assignment[:, 0].reshape(ORDER.steps, -1))

    return start


def test_a_slot_is_written_again_only_when_its_copy_is_done(gpu, start, train_digits):
    """The host never waits for the main stream, as in a training loop without a look at a loss."""
    main, _ = gpu
    thread, seen = start(), []
    for _ in range(ORDER.steps):
        pixels = next(thread)[0]
        main.enqueue(lambda pixels=pixels: seen.append(pixels[:, 0].clone()))
    thread.stop()
    main.synchronize()

    as_bytes = {"mean": (0.0, 0.0, 0.0), "std": (1 / 255, 1 / 255, 1 / 255)}
    plain = Loader(train_digits.beton, train_digits.labels, CROP, 8, seed=5, **as_bytes)
    for ours, batch in zip(seen, _without_gpu(plain), strict=True):
        np.testing.assert_array_equal(ours, batch)


def _without_gpu(loader):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ffcv.loader.epoch_iterator.IS_CUDA", False)
        for batch in loader.epoch(ORDER):
            yield batch.images.permute(0, 2, 3, 1).round().to(torch.uint8).numpy()


def test_copies_come_after_what_was_queued_before_the_epoch(gpu, start):
    """Their memory may be what earlier work of the main stream still reads."""
    main, _ = gpu
    begun = []
    main.enqueue(lambda: begun.append(True))
    thread = start()
    next(thread)
    thread.cuda_streams[0].synchronize()
    assert begun
    thread.stop()


def test_stopping_waits_for_the_copies(gpu, start, monkeypatch):
    thread = start()
    next(thread)
    assert thread.cuda_streams[0].done == 0
    left = []
    close = thread.close

    def closing():
        left.extend(stream.queued - stream.done for stream in thread.cuda_streams)
        close()

    monkeypatch.setattr(thread, "close", closing)
    thread.stop()
    assert left == [0, 0, 0]
    assert not thread.is_alive()


def test_the_thread_uses_the_gpu_of_its_process(gpu, start):
    _, chosen = gpu
    thread = start()
    ident = thread.ident
    thread.stop()
    assert chosen == [(Stream.device, ident)]

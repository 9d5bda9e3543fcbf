"""An FFCV decoder whose crops and flips depend only on (seed, epoch, sample, view).

FFCV's own random operations draw from per-thread state; ours hash a counter, so a sample looks the
same in epoch e on one thread or eight, on one rank or sixty-four, before and after a restart.
`loader.py` puts it at the head of the image pipeline.
"""

import ctypes
import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from typing import Any, Literal

import numpy as np
from llvmlite import binding
from numba import carray, get_thread_id, njit, prange, types
from numba import config as numba_config
from numba.core.typing.ctypes_utils import make_function_type
from numba.extending import intrinsic
from numpy.typing import NDArray
from PIL import Image

from dps_dist.compiled import kept
from dps_dist.data.ffcv import (
    IMAGE_MODES,
    AllocationQuery,
    Compiler,
    SimpleRGBImageDecoder,
    State,
    ctypes_imdecode,
    ctypes_resize,
)

# Places in the little array that Python and the compiled loop share.
EPOCH, BROKEN, DECODED, CUT = range(4)
NONE_BROKEN = np.iinfo(np.int64).max

_KINDS = ("resized", "pad", "center")
_RESIZED, _PAD = 0, 1

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S11 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(11)
_UNIT = 2.0**-53


@dataclass(frozen=True)
class Crop:
    """How a stored image becomes a square of `size` pixels.

    resized: a random box of `scale` of the area and `ratio` of width to height, resized (ImageNet);
    pad: the image moved by up to `pad` pixels over black (CIFAR; all stored at that size);
    center: the middle box of `keep` of the shorter side, resized (evaluation).
    """

    kind: Literal["resized", "pad", "center"]
    flip: bool = False
    pad: int = 0
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    keep: float = 1.0


def _by_name(symbol: str, function: Any) -> Any:
    """A function of FFCV's library that compiled code calls by a name, not by an address of this
    process: only such code can be kept.
    """
    binding.add_symbol(symbol, ctypes.cast(function, ctypes.c_void_p).value)
    return types.ExternalFunction(symbol, make_function_type(function).sig)


FFCV = f"ffcv {version('ffcv')}"
_imdecode = _by_name("dps_ffcv_imdecode", ctypes_imdecode)
_resize = _by_name("dps_ffcv_resize", ctypes_resize)


@intrinsic
def _pointer(typingctx: Any, address: Any) -> Any:
    """An integer as a pointer: a closure's arrays are frozen when it is compiled, memory is not."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.uintp), codegen


@njit(inline="always")
def _mix(z: Any) -> Any:
    """splitmix64's finaliser."""
    z = (z ^ (z >> _S30)) * _MIX1
    z = (z ^ (z >> _S27)) * _MIX2
    return z ^ (z >> _S31)


@njit(inline="always")
def _key(seed: Any, epoch: Any, sample: Any, view: Any) -> Any:
    key = _mix(np.uint64(seed) + _GOLDEN)
    key = _mix(key ^ (np.uint64(epoch) + _GOLDEN))
    key = _mix(key ^ (np.uint64(sample) + _GOLDEN))
    return _mix(key ^ (np.uint64(view) + _GOLDEN))


@njit(inline="always")
def _uniform(key: Any, draw: int) -> Any:
    """The draw-th uniform number in [0, 1) of a key."""
    return np.float64(_mix(key + np.uint64(draw + 1) * _GOLDEN) >> _S11) * _UNIT


@njit
def _resized_box(key: Any, height: int, width: int, scale: Any, ratio: Any) -> Any:
    """Torchvision's RandomResizedCrop: ten tries, then the middle; → top, left, height, width."""
    log_low, log_high = np.log(ratio[0]), np.log(ratio[1])
    for attempt in range(10):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * _uniform(key, 4 * attempt + 1))
        aspect = np.exp(log_low + (log_high - log_low) * _uniform(key, 4 * attempt + 2))
        w, h = round(np.sqrt(area * aspect)), round(np.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            top = int(_uniform(key, 4 * attempt + 3) * (height - h + 1))
            left = int(_uniform(key, 4 * attempt + 4) * (width - w + 1))
            return top, left, h, w
    w, h = width, height
    if width < height * ratio[0]:
        h = min(height, round(w / ratio[0]))
    elif width > height * ratio[1]:
        w = min(width, round(h * ratio[1]))
    return (height - h) // 2, (width - w) // 2, h, w


@njit
def _middle(height: int, width: int, keep: float) -> Any:
    """The square of `keep` of the shorter side; → top, left, side."""
    side = max(1, int(keep * min(height, width)))
    return (height - side) // 2, (width - side) // 2, side


@njit
def _shifted(source: Any, down: int, right: int, out: Any) -> None:
    """out[y, x] = source[y + down, x + right], black outside."""
    height, width, channels = source.shape
    for y in range(height):
        for x in range(width):
            inside = 0 <= y + down < height and 0 <= x + right < width
            for channel in range(channels):
                out[y, x, channel] = source[y + down, x + right, channel] if inside else 0


@njit
def _stored(address: Any, beton: Any) -> Any:
    """An image's bytes in the mapped file (`mapped.py`)."""
    file, places, sizes = beton
    return file[address : address + sizes[np.searchsorted(places, address)]]


@kept(made_with=FFCV, nogil=True)
def _decode_jpeg(stored: Any, height: int, width: int, out: Any) -> Any:
    """Not 0 when the bytes are damaged."""
    return _imdecode(
        *(stored.ctypes.data, stored.size, height, width),
        *(out.ctypes.data, height, width, 0, 0, 1, 1, False, False),
    )


@njit(nogil=True, error_model="numpy")
def _cut(
    image: Any,
    out: Any,
    key: Any,
    kind: int,
    pad: int,
    keep: float,
    scale: Any,
    ratio: Any,
) -> None:
    """One view of an image, by the draws of its key."""
    height, width, _ = image.shape
    if kind == _PAD:
        down = int(_uniform(key, 1) * (2 * pad + 1)) - pad
        right = int(_uniform(key, 2) * (2 * pad + 1)) - pad
        _shifted(image, down, right, out)
    else:
        if kind == _RESIZED:
            top, left, h, w = _resized_box(key, height, width, scale, ratio)
        else:
            top, left, h = _middle(height, width, keep)
            w = h
        _resize(
            *(0, image.ctypes.data, height, width, top, top + h, left, left + w),
            *(out.ctypes.data, out.shape[0], out.shape[1]),
        )


@njit(nogil=True, fastmath=True)
def _emit(view: Any, mirrored: bool, scale: Any, shift: Any, out: Any) -> None:
    """out ← view · scale + shift for each channel, mirrored or not."""
    height, width, _ = view.shape
    for y in range(height):
        for x in range(width):
            at = width - 1 - x if mirrored else x
            for channel in range(3):
                out[y, x, channel] = view[y, at, channel] * scale[channel] + shift[channel]


def _decode_batch(samples: Any, destination: Any, metadata: Any, beton: Any, how: Any) -> None:
    """destination[row] ← the views of samples[row]; `how` is KeyedDecoder's `_how`."""
    crop, seed, multiply, add, shared_at, jpeg, most_threads, largest = how
    kind, flip, pad, keep, scale, ratio = crop
    views, size = destination.shape[1], destination.shape[2]
    shared = carray(_pointer(shared_at), (4,), np.int64)
    decoded = carray(_pointer(shared[DECODED]), (most_threads, largest), np.uint8)
    cut = carray(_pointer(shared[CUT]), (most_threads, size, size, 3), np.uint8)
    for row in prange(len(samples)):
        sample, thread = samples[row], get_thread_id()
        field = metadata[sample]
        stored = _stored(field["data_ptr"], beton)
        height, width = np.int64(field["height"]), np.int64(field["width"])
        if field["mode"] == jpeg:
            pixels = decoded[thread][: height * width * 3]
            if _decode_jpeg(stored, height, width, pixels) != 0:
                shared[BROKEN] = sample
        else:
            pixels = stored
        image = pixels.reshape(height, width, 3)
        for view in range(views):
            key = _key(seed, shared[EPOCH], sample, view)
            _cut(image, cut[thread], key, kind, pad, keep, scale, ratio)
            mirrored = flip and _uniform(key, 0) < 0.5
            _emit(cut[thread], mirrored, multiply, add, destination[row, view])


@cache
def _compiled(parallel: bool) -> Any:
    fast: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": True}
    return kept(made_with=FFCV, parallel=parallel, **fast)(_decode_batch)


class KeyedDecoder(SimpleRGBImageDecoder):  # type: ignore[misc]
    """Decodes each image once and cuts `views` crops from it: [batch, views, size, size, 3].

    normalize: the mean and deviation of bytes, for float32 images; None leaves them uint8.
    `start_epoch` comes before each epoch; a new `size` does not compile again.
    """

    def __init__(
        self, crop: Crop, seed: int, views: int = 1, normalize: tuple[Any, Any] | None = None
    ) -> None:
        super().__init__()
        self.crop, self.seed, self.views, self.size = crop, seed, views, 1
        mean, std = np.array(normalize or ((0, 0, 0), (1, 1, 1)), np.float32)
        self._multiply, self._add = tuple(1 / std), tuple(-mean / std)
        self._dtype = np.dtype("f4" if normalize else "u1")
        # Compiled code keeps addresses: what is behind them is kept here.
        self._shared = np.zeros(4, np.int64)
        self._buffers: tuple[NDArray[np.uint8], ...] = ()

    def start_epoch(self, epoch: int, size: int) -> None:
        """One buffer a thread for a decoded image, one for a view cut from it.

        FFCV has one a sample; these stay in the cache, and for a batch of 256 ImageNet photographs
        take megabytes instead of a gigabyte.
        """
        self.size = size
        threads, largest = numba_config.NUMBA_NUM_THREADS, self._largest()
        self._buffers = tuple(np.empty((threads, n), np.uint8) for n in (largest, size * size * 3))
        addresses = [buffer.ctypes.data for buffer in self._buffers]
        self._shared[:] = epoch, NONE_BROKEN, *addresses

    @property
    def broken_sample(self) -> int | None:
        """A sample whose stored bytes could not be decoded since the epoch began."""
        found = int(self._shared[BROKEN])
        return None if found == NONE_BROKEN else found

    def declare_state_and_memory(self, previous_state: State) -> tuple[State, AllocationQuery]:
        shape = (self.views, self.size, self.size, 3)
        state = replace(previous_state, jit_mode=True, shape=shape, dtype=self._dtype)
        return state, AllocationQuery(shape, self._dtype)

    def generate_code(self) -> Callable[..., Any]:
        run = _compiled(Compiler.num_threads > 1)
        how = self._how()

        def decode(batch_indices, destination, metadata, storage_state):  # type: ignore[no-untyped-def]
            run(batch_indices, destination, metadata, storage_state, how)
            return destination[: len(batch_indices)]

        return decode

    def _how(self) -> tuple[Any, ...]:
        crop = self.crop
        kind = _KINDS.index(crop.kind)
        scale, ratio = (tuple(map(float, pair)) for pair in (crop.scale, crop.ratio))
        cut = (kind, crop.flip, crop.pad, float(crop.keep), scale, ratio)
        pixels = self.seed, self._multiply, self._add
        places = self._shared.ctypes.data, IMAGE_MODES["jpg"]
        return cut, *pixels, *places, numba_config.NUMBA_NUM_THREADS, self._largest()

    def _largest(self) -> int:
        return int(self.metadata["height"].max()) * int(self.metadata["width"].max()) * 3


def centered(images: NDArray[np.uint8], keep: float, size: int) -> NDArray[np.uint8]:
    """[N, H, W, 3] → [N, size, size, 3]: what a `center` crop makes of them, to the bit."""
    images, (height, width) = np.ascontiguousarray(images), images.shape[1:3]
    top, left, side = _middle(height, width, keep)
    out = np.empty((len(images), size, size, 3), np.uint8)
    for image, made in zip(images, out, strict=True):
        ctypes_resize(
            *(0, image.ctypes.data, height, width, top, top + side, left, left + side),
            *(made.ctypes.data, size, size),
        )
    return out


def decodes_jpeg() -> bool:
    """Whether FFCV's library turns a JPEG into the right pixels, for `dps doctor`."""
    picture = Image.new("RGB", (16, 16), (200, 100, 50))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=95)
    pixels = np.zeros((16, 16, 3), np.uint8)
    stored = np.frombuffer(buffer.getvalue(), np.uint8)
    failed = _decode_jpeg(stored, 16, 16, pixels)
    return failed == 0 and bool(np.abs(pixels - np.array([200, 100, 50])).max() < 4)

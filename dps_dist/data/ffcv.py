"""The one door to FFCV: all that this package uses of it, with two of its habits mended.

On import FFCV makes a typed dictionary of two entries, for which numba compiles for four seconds in
every process. Nothing compiled reads it, so that a plain one does.

With its own threads FFCV sets torch's, for the whole process, on import and later from its reading
thread. On how many threads torch adds up depend the last bits of a step: torch's are left alone.
"""

import numba.typed
import torch

_typed, numba.typed.Dict = numba.typed.Dict, dict
_torch_threads = torch.get_num_threads()
try:
    from ffcv.fields.rgb_image import IMAGE_MODES, RGBImageField, SimpleRGBImageDecoder
finally:
    numba.typed.Dict = _typed
    torch.set_num_threads(_torch_threads)

import ffcv.loader.loader as loader_module  # noqa: E402
from ffcv.fields import IntField  # noqa: E402
from ffcv.libffcv import ctypes_imdecode, ctypes_resize  # noqa: E402
from ffcv.loader import Loader, OrderOption  # noqa: E402
from ffcv.loader.epoch_iterator import EpochIterator  # noqa: E402
from ffcv.memory_allocator import MemoryAllocator  # noqa: E402
from ffcv.memory_managers.os_cache import OSCacheContext, OSCacheManager  # noqa: E402
from ffcv.pipeline.allocation_query import AllocationQuery  # noqa: E402
from ffcv.pipeline.compiler import Compiler  # noqa: E402
from ffcv.pipeline.state import State  # noqa: E402
from ffcv.reader import Reader  # noqa: E402
from ffcv.transforms import ToDevice, ToTensor  # noqa: E402
from ffcv.types import (  # noqa: E402
    CURRENT_VERSION,
    FieldDescType,
    HeaderType,
    get_handlers,
    get_metadata_type,
)
from ffcv.writer import DatasetWriter, handle_sample  # noqa: E402


def _set_num_threads(n: int) -> None:
    Compiler.num_threads = n
    numba.set_num_threads(n)


Compiler.set_num_threads = _set_num_threads

__all__ = [
    "CURRENT_VERSION",
    "IMAGE_MODES",
    "AllocationQuery",
    "Compiler",
    "DatasetWriter",
    "EpochIterator",
    "FieldDescType",
    "HeaderType",
    "IntField",
    "Loader",
    "MemoryAllocator",
    "OSCacheContext",
    "OSCacheManager",
    "OrderOption",
    "RGBImageField",
    "Reader",
    "SimpleRGBImageDecoder",
    "State",
    "ToDevice",
    "ToTensor",
    "ctypes_imdecode",
    "ctypes_resize",
    "get_handlers",
    "get_metadata_type",
    "handle_sample",
    "loader_module",
]

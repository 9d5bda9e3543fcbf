"""The one door to FFCV: all that this package uses of it, without four seconds of waiting.

On import FFCV makes a typed dictionary of two entries, for which numba compiles in every process.
Nothing compiled reads it, so that a plain one does.
"""

import numba.typed

_typed, numba.typed.Dict = numba.typed.Dict, dict
try:
    from ffcv.fields.rgb_image import IMAGE_MODES, RGBImageField, SimpleRGBImageDecoder
finally:
    numba.typed.Dict = _typed

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

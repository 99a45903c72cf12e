# SPDX-License-Identifier: Apache-2.0
"""The few NCCL functions that a weight broadcast takes, of the library that torch has loaded.

The engine may live in another environment with an NCCL of its own. Two versions in one group fail
in ways that name neither, so the engine is told to load the trainer's file (VLLM_NCCL_SO_PATH),
and both report their version before they meet. Needs no vLLM, and for the version no GPU.
"""

import ctypes
import os
from typing import Any

from ..errors import EngineConfigError, EngineError

PATH_VARIABLE = "VLLM_NCCL_SO_PATH"
UNIQUE_ID_BYTES = 128
_DEFAULT_NAME = "libnccl.so.2"
# nccl.h: ncclDataType_t and ncclRedOp_t
_UINT8 = 1
_FLOAT32 = 7
_SUM = 0


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * UNIQUE_ID_BYTES)]


_ARGUMENTS: dict[str, list[Any]] = {
    "ncclGetVersion": [ctypes.POINTER(ctypes.c_int)],
    "ncclGetUniqueId": [ctypes.POINTER(_UniqueId)],
    "ncclCommInitRank": [
        ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, _UniqueId, ctypes.c_int
    ],
    "ncclAllReduce": [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int,
        ctypes.c_void_p, ctypes.c_void_p,
    ],
    "ncclBroadcast": [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int,
        ctypes.c_void_p, ctypes.c_void_p,
    ],
    "ncclCommAbort": [ctypes.c_void_p],
}  # fmt: skip


class NcclLibrary:
    """A loaded NCCL. Communicators are opaque integers; pointers and streams are addresses."""

    def __init__(self, path: str) -> None:
        """Load it; raises EngineConfigError when there is none at ``path``."""
        try:
            self._library = ctypes.CDLL(path)
            for name, arguments in _ARGUMENTS.items():
                getattr(self._library, name).argtypes = arguments
            self._library.ncclGetErrorString.restype = ctypes.c_char_p
        except (OSError, AttributeError) as error:
            raise EngineConfigError(
                f"no NCCL at {path} ({error}): bridge.transport nccl needs the one that torch "
                "uses, from the package nvidia-nccl or from the system"
            ) from None
        # Found by its name alone: the engine has to be told which file that was.
        self.path = path if "/" in path else _mapped_path() or path

    def version(self) -> int:
        """As NCCL writes it: 22907 is 2.29.7."""
        version = ctypes.c_int()
        self._call("ncclGetVersion", ctypes.byref(version))
        return version.value

    def unique_id(self) -> bytes:
        """A new name for a group; this process then listens for its members."""
        unique_id = _UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(unique_id))
        return bytes(unique_id)

    def join(self, unique_id: bytes, rank: int, world_size: int) -> int:
        """Join a group on the current device; returns when all members have."""
        communicator = ctypes.c_void_p()
        name = _UniqueId.from_buffer_copy(unique_id)
        self._call("ncclCommInitRank", ctypes.byref(communicator), world_size, name, rank)
        assert communicator.value is not None
        return communicator.value

    def broadcast_bytes(
        self, pointer: int, num_bytes: int, root: int, communicator: int, stream: int
    ) -> None:
        """Queue a broadcast of bytes, from and to the same place."""
        self._call("ncclBroadcast", pointer, pointer, num_bytes, _UINT8, root, communicator, stream)

    def sum_float32(self, pointer: int, count: int, communicator: int, stream: int) -> None:
        """Queue an all-reduce in place."""
        self._call("ncclAllReduce", pointer, pointer, count, _FLOAT32, _SUM, communicator, stream)

    def abort(self, communicator: int) -> None:
        """Leave a group whose other members may be gone."""
        self._call("ncclCommAbort", communicator)

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._library, name)(*arguments)
        if result != 0:
            text = self._library.ncclGetErrorString(result).decode()
            raise EngineError(
                f"{name} failed: {text}. NCCL_DEBUG=INFO in the environment of trainer and engine "
                "tells more"
            )


def loaded_library_path() -> str:
    """The NCCL that this process uses: torch's, or a name for the loader to find."""
    import torch  # noqa: F401 - it brings its NCCL along

    return _mapped_path() or _DEFAULT_NAME


def _mapped_path() -> str | None:
    """The NCCL file that this process has in memory."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.rstrip().rpartition(" ")[2]
            if os.path.basename(path).startswith("libnccl.so"):
                return path
    return None


def engine_library_version() -> int:
    """Version of the NCCL that vLLM loads in this process, where a trainer has set it; else 0."""
    path = os.environ.get(PATH_VARIABLE)
    return NcclLibrary(path).version() if path else 0


def version_text(version: int) -> str:
    """22907 as 2.29.7; 0 is unknown."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}" if version else "unknown"


def check_same_version(trainer: int, engine: int, path: str) -> None:
    """Raise EngineConfigError unless both ends of a broadcast have the same NCCL."""
    if trainer != engine:
        raise EngineConfigError(
            f"the trainer's NCCL is {version_text(trainer)}, the engine's {version_text(engine)}, "
            f"and a broadcast needs one: let the engine's environment load {path} "
            f"({PATH_VARIABLE} is set to it), or install the same nvidia-nccl in both"
        )

# SPDX-License-Identifier: Apache-2.0
"""Reading the index of a distributed checkpoint without trusting its pickle.

``torch.distributed.checkpoint`` keeps the place of every tensor in a pickle, ``.metadata``, and
loads it with ``pickle.load``: whoever can write into the folder could run code in the process that
resumes. Here only the few data classes that such a file consists of can be made. Tensors are read
with ``weights_only``, and other objects are never read.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from megatron.rl.checkpoint.manifest import DamagedCheckpoint

METADATA_NAME = ".metadata"

_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = frozenset(
    {
        (_METADATA, "Metadata"),
        (_METADATA, "TensorStorageMetadata"),
        (_METADATA, "BytesStorageMetadata"),
        (_METADATA, "ChunkStorageMetadata"),
        (_METADATA, "MetadataIndex"),
        (_METADATA, "TensorProperties"),
        (_METADATA, "StorageMeta"),
        (_METADATA, "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("pathlib", "PosixPath"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
    }
)


class IndexReader(FileSystemReader):
    """Torch's reader of distributed checkpoints, with an index that cannot run code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index.

        Raises:
            DamagedCheckpoint: it holds anything but an index.
        """
        metadata = load_metadata(Path(self.path) / METADATA_NAME)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


def load_metadata(path: Path) -> Metadata:
    """Read a ``.metadata`` file; see :meth:`IndexReader.read_metadata`."""
    try:
        metadata = _IndexUnpickler(io.BytesIO(path.read_bytes())).load()
    except Exception as error:  # a damaged pickle raises nearly anything
        raise DamagedCheckpoint(f"{path.name} is no index of a checkpoint: {error}") from None
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise DamagedCheckpoint(f"{path.name} is no index of a checkpoint")
    for info in metadata.storage_data.values():
        if Path(info.relative_path).name != info.relative_path:
            raise DamagedCheckpoint(f"{path.name} points outside of its folder")
    return metadata


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in it")
        return super().find_class(module, name)

# SPDX-License-Identifier: Apache-2.0
"""Packs an update into a transport's memory, bucket by bucket, in the form in which it travels."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..checkpoint_index import CheckpointIndex, TensorInfo, check_names, check_update_names
from ..errors import EngineRequestError
from .weight_format import WeightFormat
from .weight_transport import WeightTransport

if TYPE_CHECKING:
    import torch

Bucket = tuple[str, ...]


@dataclass(frozen=True)
class PackedUpdate:
    """A complete update that is in the transport's slots."""

    version: int
    buckets: tuple[Bucket, ...]
    names: tuple[str, ...]
    digests: Mapping[str, int]
    num_bytes: int


class WeightPacker:
    """Puts updates into a transport's slots; checks that each is exactly the checkpoint's."""

    def __init__(
        self,
        transport: WeightTransport,
        index: CheckpointIndex,
        weight_format: WeightFormat,
        bucket_bytes: int,
        with_digests: bool,
    ) -> None:
        self._transport = transport
        self._index = index
        self._format = weight_format
        self._bucket_bytes = bucket_bytes
        self._with_digests = with_digests
        self._manifest = weight_format.manifest(index)
        self._announced: tuple[str, ...] = ()
        self._packed: dict[str, TensorInfo] = {}
        self._buckets: list[Bucket] = []
        self._digests: dict[str, int] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The checkpoint's tensors that an update was announced to bring; none where unknown."""
        return self._announced

    def announce(
        self,
        tensors: "Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]",
        shapes: Mapping[str, Sequence[int]] | None,
    ) -> "Iterable[tuple[str, torch.Tensor]]":
        """Check what is known of an update before it is packed; returns what `pack` takes.

        Afterwards `names` is empty where nothing was known: such an update is complete only once
        all of it is packed, and until then nothing of it may reach the engine.
        """
        self._announced = ()
        if isinstance(tensors, Mapping):
            self.check_shapes({name: tensor.shape for name, tensor in tensors.items()})
            return tensors.items()
        if shapes is not None:
            self.check_shapes(shapes)
        elif not self._transport.keeps_weights:
            raise EngineRequestError(
                f"an update through {self._transport.backend} needs the shapes of all tensors "
                "beforehand: its memory does not hold the whole model"
            )
        return tensors

    def check_shapes(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raise WeightNamesError unless these are the checkpoint's tensors, before any is made."""
        infos = {
            name: TensorInfo(self._index.tensors[name].dtype, tuple(shape))
            if name in self._index.tensors
            else TensorInfo("F32", tuple(shape))
            for name, shape in shapes.items()
        }
        check_update_names(infos, self._index)
        self._announced = tuple(shapes)

    def slot(self, name: str, shape: Sequence[int]) -> "torch.Tensor | None":
        """Where a tensor may be assembled so that packing it costs nothing; None: anywhere.

        It has the type in which the tensor travels; what is copied into it is rounded once.
        """
        info = self._manifest.get(name)
        if info is None or self._format.quantizes(name) or info.shape != tuple(shape):
            return None
        if not self._transport.keeps_weights:
            return None  # a slot may be filled only when its bucket's turn has come
        self._transport.open(self._manifest)
        return self._transport.slot(name)

    def pack(self, tensors: "Iterable[tuple[str, torch.Tensor]]") -> Iterator[Bucket]:
        """Pack all tensors, one at a time; yields each bucket as soon as it is full.

        Raises WeightNamesError on unknown, repeated, misshapen and, at the end, missing tensors.
        """
        self._transport.open(self._manifest)
        self._packed, self._buckets, self._digests = {}, [], {}
        return self._pack(tensors)

    def _pack(self, tensors: "Iterable[tuple[str, torch.Tensor]]") -> Iterator[Bucket]:
        bucket: list[str] = []
        size = 0
        for name, tensor in tensors:
            self._check(name, tensor)
            parts = self._format.parts(name)
            slots = {part: self._transport.slot(part) for part in parts}
            packed = self._format.pack(name, tensor, slots)
            if self._with_digests:
                digest = self._format.digest(name, packed)
                if digest is not None:
                    self._digests[name] = digest
            bucket += parts
            size += sum(self._manifest[part].num_bytes for part in parts)
            if size >= self._bucket_bytes:
                yield self._cut(bucket)
                bucket, size = [], 0
        check_update_names(self._packed, self._index)
        if bucket:
            yield self._cut(bucket)

    def packed(self, version: int) -> PackedUpdate:
        """What `pack` has put into the slots, once it has come to its end."""
        names = [name for bucket in self._buckets for name in bucket]
        return PackedUpdate(
            version,
            tuple(self._buckets),
            tuple(self._packed),
            dict(self._digests),
            sum(self._manifest[name].num_bytes for name in names),
        )

    def _check(self, name: str, tensor: "torch.Tensor") -> None:
        if name in self._packed:
            check_names([name, name], self._index, complete=False)
        info = TensorInfo.of(tensor)
        check_update_names({name: info}, self._index, complete=False)
        self._packed[name] = info

    def _cut(self, bucket: list[str]) -> Bucket:
        self._buckets.append(tuple(bucket))
        return self._buckets[-1]

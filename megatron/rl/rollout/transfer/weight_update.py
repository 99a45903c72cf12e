# SPDX-License-Identifier: Apache-2.0
"""The trainer's side of weight updates: which weights the engine should have, and how it gets them.

Packing a bucket overlaps with the engine's loading of the one before. What a restarted engine needs
stays in the transport's memory.
"""

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..checkpoint_index import CheckpointIndex
from ..client.engine_config import VLLMEngineConfig, fp8_arguments
from ..errors import WeightsLost
from ..json_array import json_array, read_json_array
from ..protocol import WeightsReport
from ..wire import Message
from .digests import DigestComparison, compare_digests, merge_digests
from .weight_format import WeightFormat
from .weight_packer import Bucket, PackedUpdate, WeightPacker
from .weight_transport import WeightTransport, make_transport

if TYPE_CHECKING:
    import torch

    from ..client.worker_handle import EngineInfo, WorkerHandle

# What a new process holds: the weights of the model folder.
_CHECKPOINT = -1


class UpdateSession:
    """One update of one engine process, over its connection."""

    def __init__(
        self, handle: "WorkerHandle", transport: WeightTransport, timeout_s: float
    ) -> None:
        self._handle = handle
        self._transport = transport
        self._timeout_s = timeout_s
        self._in_flight: collections.deque[tuple[int, Bucket]] = collections.deque()

    def start(self, names: Iterable[str], introduce: bool) -> None:
        """Have the engine check the names and get ready; `introduce` it to the transport first."""
        if introduce:
            request = self._post("init_transfer", {"init_info": self._transport.init_info()})
            self._transport.connect()
            self._answer(request, "init_transfer")
        arrays = {"names": json_array(list(names))}
        self._answer(self._post("start_update", {}, arrays), "start_update")

    def send(self, bucket: Bucket) -> None:
        """Announce and send a full bucket; the engine loads it while the next is packed."""
        if len(self._in_flight) >= self._transport.max_in_flight:
            self._await_oldest()
        arrays = {"update_info": json_array(self._transport.describe(bucket))}
        self._in_flight.append((self._post("update_bucket", {}, arrays), bucket))
        self._transport.transmit(bucket)

    def finish(self, version: int, with_digests: bool) -> list[Any]:
        """Await everything and put the weights into effect; returns its workers' digests."""
        while self._in_flight:
            self._await_oldest()
        fields = {"version": version, "digests": with_digests}
        answer = self._answer(self._post("finish_update", fields), "finish_update")
        self._transport.finish()
        return list(read_json_array(answer.arrays["digests"])) if with_digests else []

    def _await_oldest(self) -> None:
        request, bucket = self._in_flight.popleft()
        self._answer(request, "update_bucket")
        self._transport.loaded(bucket)

    def _post(
        self, kind: str, fields: Mapping[str, Any], arrays: Mapping[str, Any] | None = None
    ) -> int:
        return self._handle.post(kind, fields, arrays or {}, self._timeout_s)

    def _answer(self, request: int, kind: str) -> Message:
        return self._handle.answer(request, kind, self._timeout_s)


class WeightUpdates:
    """The weights of one engine over its restarts: wanted, packed, and in its process.

    An engine may generate only with the version that is wanted. While buckets go in, its process
    holds a mixture; a process that stops there has to be replaced (`mixed`).
    """

    def __init__(self, config: VLLMEngineConfig, index: CheckpointIndex) -> None:
        self._config = config
        self._index = index
        self._transport = make_transport(
            config.transport,
            bucket_bytes=config.bucket_mib << 20,
            num_receivers=config.num_workers,
        )
        self._packer: WeightPacker | None = None
        self._packed: PackedUpdate | None = None  # what a restarted process is given
        # An engine that computes in FP8 starts with dummy weights, which nobody wants.
        self._wanted: int | None = None if config.computes_in_fp8 else _CHECKPOINT
        self._held: int | None = _CHECKPOINT  # by the process; None: neither old nor new
        self._introduced: dict[str, Any] | None = None  # what the process knows of the transport
        self._comparison = DigestComparison(0, ())
        self.mixed = False

    @property
    def version(self) -> int:
        """The version that rollouts must carry."""
        return 0 if self._wanted is None else max(self._wanted, 0)

    @property
    def keeps_weights(self) -> bool:
        """Whether a replaced process can be given the last update again."""
        return self._transport.keeps_weights

    def engine_arguments(self) -> dict[str, Any]:
        """Arguments of vllm.LLM."""
        return fp8_arguments(self._config, self._index) | self._transport.engine_arguments()

    def engine_environment(self) -> dict[str, str]:
        """Environment of the process."""
        return self._transport.engine_environment()

    def process_started(self) -> None:
        """A new process knows nothing of what the one before was given."""
        self._held, self._introduced, self.mixed = _CHECKPOINT, None, False
        self._transport.engine_started()

    def check_engine(self, info: "EngineInfo") -> None:
        """Raise EngineConfigError where the transport cannot work with this process."""
        self._transport.check_engine(info)

    def require(self) -> None:
        """Raise WeightsLost unless the process holds exactly what is wanted."""
        if self._wanted is None or self._held != self._wanted:
            raise WeightsLost(
                "the engine has no complete set of weights (it has had none yet, or its last "
                "update failed): update the weights before generating"
            )

    def pack(
        self,
        tensors: "Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]",
        shapes: Mapping[str, Sequence[int]] | None,
        dtype: str,
    ) -> Iterator[Bucket]:
        """Begin an update: check what is known of its names, and return its buckets to be.

        Where nothing is known, all of it is packed at once: whether it is complete shows at the
        end only, and until then nothing may reach the engine.
        """
        packer = self._packer_for(dtype)
        pairs = packer.announce(tensors, shapes)
        self._packed = None  # the slots are going to be overwritten
        buckets = packer.pack(pairs)
        if packer.names:
            return buckets
        packed = list(buckets)
        self._held = None  # not these weights, even where it has some of the same version
        return iter(packed)

    def slot(self, name: str, shape: Sequence[int], dtype: str) -> "torch.Tensor | None":
        """Where a tensor may be assembled so that packing it costs nothing; None: anywhere."""
        return self._packer_for(dtype).slot(name, shape)

    def stream(self, handle: "WorkerHandle", buckets: Iterator[Bucket], version: int) -> None:
        """Send each bucket as soon as it is packed."""
        assert self._packer is not None
        session = self._session(handle)
        session.start(self._packer.names, self._introduce())
        self.mixed, self._held = True, None
        for bucket in buckets:
            session.send(bucket)
        self._finish(session, self._packer.packed(version))

    def complete(self, version: int) -> None:
        """All is packed: this is the version that is wanted from now on."""
        assert self._packer is not None
        self._packed = self._packer.packed(version)
        self._wanted = version

    def give(self, handle: "WorkerHandle") -> None:
        """Send the last update, unless the process has it."""
        if self._packed is None or self._held == self._wanted:
            return
        session = self._session(handle)
        session.start(self._packed.names, self._introduce())
        self.mixed, self._held = True, None
        for bucket in self._packed.buckets:
            session.send(bucket)
        self._finish(session, self._packed)

    def report(self, seconds: float) -> WeightsReport:
        """About the last update."""
        assert self._packed is not None
        return WeightsReport(
            version=self._packed.version,
            tensors=len(self._packed.names),
            nbytes=self._packed.num_bytes,
            seconds=seconds,
            digests_compared=self._comparison.compared,
            digests_unmapped=self._comparison.unmapped,
        )

    def close(self) -> None:
        """Give the transport's memory back."""
        self._transport.close()

    def _packer_for(self, dtype: str) -> WeightPacker:
        if self._packer is None:
            config = self._config
            weight_format = WeightFormat(dtype, config.quantization, config.scales)
            self._packer = WeightPacker(
                self._transport,
                self._index,
                weight_format,
                config.bucket_mib << 20,
                config.digests,
            )
        return self._packer

    def _session(self, handle: "WorkerHandle") -> UpdateSession:
        return UpdateSession(handle, self._transport, self._config.stall_timeout_s)

    def _introduce(self) -> bool:
        info = self._transport.init_info()
        known, self._introduced = self._introduced, info
        return info != known

    def _finish(self, session: UpdateSession, packed: PackedUpdate) -> None:
        parts = session.finish(packed.version, self._config.digests)
        self.mixed = False  # all of it is in, whatever it is
        self._comparison = DigestComparison(0, ())
        if self._config.digests:
            held = merge_digests(parts)
            self._comparison = compare_digests(packed.digests, held, packed.version)
        self._held = packed.version

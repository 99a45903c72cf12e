# SPDX-License-Identifier: Apache-2.0
"""Weight updates of a vLLM server: its own control routes in order, each answer checked.

    pause -> [init_weight_transfer_engine] -> start_weight_update -> update_weights ...
          -> finish_weight_update -> reset_prefix_cache -> [digests] -> resume

Only names, places and sizes go over HTTP; the weights take the transport.
"""

import collections
import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from ..checkpoint_index import CheckpointIndex
from ..errors import EngineConfigError, EngineError, WeightsLost
from ..protocol import WeightsReport
from ..transfer.digests import DigestComparison, compare_digests, merge_digests
from ..transfer.weight_format import WeightFormat
from ..transfer.weight_packer import Bucket, WeightPacker
from ..transfer.weight_transport import WeightTransport
from .client import ServerClient, ServerStatusError

if TYPE_CHECKING:
    import torch

# What a server calls the weights of its model folder.
CHECKPOINT_LABEL = "default"
# A server that refuses an introduction does so at once, before it waits for the transport.
_REFUSAL_S = 0.3


class ServerWeights:
    """Gives one server the weights of one run, and knows whether it has them."""

    def __init__(
        self,
        client: ServerClient,
        transport: WeightTransport,
        index: CheckpointIndex,
        weight_format: WeightFormat,
        *,
        bucket_bytes: int,
        with_digests: bool,
        timeout_s: float,
    ) -> None:
        self._client = client
        self._transport = transport
        self._packer = WeightPacker(transport, index, weight_format, bucket_bytes, with_digests)
        self._with_digests = with_digests
        self._timeout_s = timeout_s
        self._introduced: dict[str, Any] | None = None
        self._mixed = False

    def require(self) -> None:
        """Raise WeightsLost where an update stopped half-way."""
        if self._mixed:
            raise WeightsLost(
                "an update of the server's weights stopped half-way, and it stays paused: restart "
                "the server (nobody may sample from a mixture of old and new weights)"
            )

    def slot(self, name: str, shape: Sequence[int]) -> "torch.Tensor | None":
        """Where a tensor may be assembled so that packing it costs nothing; None: anywhere."""
        return self._packer.slot(name, shape)

    def update(
        self,
        tensors: "Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]",
        shapes: Mapping[str, Sequence[int]] | None,
        version: int,
        label: str,
    ) -> WeightsReport:
        """Replace all weights; the server calls them ``label`` from then on.

        Raises WeightNamesError before the server is touched. A failure later leaves the server
        paused, and :meth:`require` raises.
        """
        self.require()
        started = time.monotonic()
        buckets = self._pack(tensors, shapes)
        with ThreadPoolExecutor(1, thread_name_prefix="update-server") as pool:
            try:
                self._post("/pause", mode="wait")
                self._introduce(pool)
            except BaseException:
                self._introduced = None
                with contextlib.suppress(EngineError):  # the first error is the one to report
                    self._post("/resume")  # nothing has changed
                raise
            self._mixed = True  # once a start was asked for, layers may be taken apart
            self._post("/start_weight_update")
            self._send(pool, buckets)
        self._finish(label)
        packed = self._packer.packed(version)
        comparison = self._compare(packed.names, packed.digests, version)
        self._mixed = False
        self._post("/resume")
        return WeightsReport(
            version=version,
            tensors=len(packed.names),
            nbytes=packed.num_bytes,
            seconds=time.monotonic() - started,
            digests_compared=comparison.compared,
            digests_unmapped=comparison.unmapped,
        )

    def close(self) -> None:
        """Give the transport's memory back."""
        self._transport.close()

    def _pack(
        self,
        tensors: "Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]",
        shapes: Mapping[str, Sequence[int]] | None,
    ) -> Iterator[Bucket]:
        buckets = self._packer.pack(self._packer.announce(tensors, shapes))
        return buckets if self._packer.names else iter(list(buckets))

    def _introduce(self, pool: ThreadPoolExecutor) -> None:
        info = self._transport.init_info()
        if info == self._introduced:
            return
        answer = pool.submit(self._post, "/init_weight_transfer_engine", {"init_info": info})
        wait([answer], _REFUSAL_S)
        if answer.done():
            answer.result()
        self._transport.connect()
        answer.result()
        self._introduced = info

    def _send(self, pool: ThreadPoolExecutor, buckets: Iterable[Bucket]) -> None:
        """Send each bucket while the next is packed."""
        in_flight: collections.deque[tuple[Future[Any], Bucket]] = collections.deque()

        def await_oldest() -> None:
            answer, bucket = in_flight.popleft()
            answer.result()
            self._transport.loaded(bucket)

        for bucket in buckets:
            if len(in_flight) >= self._transport.max_in_flight:
                await_oldest()
            body = {"update_info": self._transport.describe(bucket)}
            in_flight.append((pool.submit(self._post, "/update_weights", body), bucket))
            self._transport.transmit(bucket)
        while in_flight:
            await_oldest()
        self._transport.finish()

    def _finish(self, label: str) -> None:
        self._post("/finish_weight_update", {"weight_version": label})
        # It holds keys and values of the old weights.
        reset_prefix_cache(self._client, self._timeout_s)
        held = self._client.get("/weight_info", self._timeout_s)["weight_version"]
        if held != label:
            raise EngineError(f"the server calls its new weights {held!r}, expected {label!r}")

    def _compare(
        self, names: Sequence[str], digests: Mapping[str, int], version: int
    ) -> DigestComparison:
        if not self._with_digests:
            return DigestComparison(0, ())
        body = {"method": "rollout_digests", "args": [list(names)]}
        answer = self._post("/collective_rpc", body)
        return compare_digests(digests, merge_digests(answer["results"]), version)

    def _post(self, path: str, body: Any = None, **query: str) -> Any:
        return post_control(self._client, path, body or {}, self._timeout_s, **query)


def post_control(client: ServerClient, path: str, body: Any, timeout_s: float, **query: str) -> Any:
    """POST to one of the development routes."""
    try:
        return client.post(path, body, timeout_s, **query)
    except ServerStatusError as error:
        if error.status in (404, 405):
            raise EngineConfigError(
                f"the server has no route {path}: start it with VLLM_SERVER_DEV_MODE=1 in its "
                "environment, and let nobody else reach its port (these routes ask for no token)"
            ) from None
        raise


def reset_prefix_cache(client: ServerClient, timeout_s: float) -> None:
    """Have the server forget the keys and values of earlier prompts."""
    if not post_control(client, "/reset_prefix_cache", {}, timeout_s)["success"]:
        raise EngineError(
            "the server did not reset its prefix cache (requests of somebody else still hold "
            "blocks): a server belongs to one run"
        )

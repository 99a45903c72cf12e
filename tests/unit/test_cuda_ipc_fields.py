# SPDX-License-Identifier: Apache-2.0
"""CUDA IPC handles as typed fields: there and back, and nothing else is taken.

The reductions are made up in the form that torch gives a CUDA tensor; a GPU makes real ones.
"""

import inspect
import json
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from megatron.rl.rollout.errors import EngineConfigError, EngineRequestError
from megatron.rl.rollout.transfer.cuda_ipc_transport import (
    ALLOCATOR_VARIABLES,
    CudaIpcHandle,
    CudaIpcTransport,
    check_allocator,
)

UUID = "a1b2c3d4-0000-1111-2222-333344445555"


def reduction(**changes: Any) -> tuple[Any, ...]:
    """Arguments of rebuild_cuda_tensor for 1,000 bytes in a storage of 1,024."""
    arguments = {
        "tensor_cls": torch.Tensor,
        "tensor_size": torch.Size([1000]),
        "tensor_stride": (1,),
        "tensor_offset": 0,
        "storage_cls": torch.storage.TypedStorage,
        "dtype": torch.uint8,
        "storage_device": 3,
        "storage_handle": b"\x02c" + bytes(range(64)),
        "storage_size_bytes": 1024,
        "storage_offset_bytes": 2048,
        "requires_grad": False,
        "ref_counter_handle": b"/torch_123_456",
        "ref_counter_offset": 7,
        "event_handle": bytes(range(64, 128)),
        "event_sync_required": True,
    }
    assert list(arguments) == list(inspect.signature(rebuild_cuda_tensor).parameters)
    return tuple((arguments | changes).values())


def test_there_and_back_through_json() -> None:
    sent = CudaIpcHandle.from_reduction(reduction(), UUID)
    received = CudaIpcHandle.from_fields(json.loads(json.dumps(sent.to_fields())))
    assert received == sent
    # The receiver has the GPU under another number; all else is as torch made it.
    assert received.rebuild_arguments(1) == reduction(storage_device=1)
    values = sent.to_fields()
    assert {type(value) for value in values.values()} <= {str, int, bool}
    assert values["event_handle"] == bytes(range(64, 128)).hex()


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.float32},
        {"tensor_size": torch.Size([10, 100])},
        {"tensor_stride": (2,)},
        {"tensor_offset": 8},
        {"storage_size_bytes": 999},
        {"storage_handle": b""},
        {"ref_counter_offset": -1},
    ],
    ids=str,
)
def test_only_whole_vectors_of_bytes_are_exported(changes: dict[str, Any]) -> None:
    with pytest.raises(EngineRequestError):
        CudaIpcHandle.from_reduction(reduction(**changes), UUID)


WRONG_FIELDS: dict[str, Any] = {
    "a number as text": {"num_bytes": "1000"},
    "a truth as a number": {"event_sync_required": 1},
    "a number as truth": {"ref_counter_offset": True},
    "a list as bytes": {"memory_handle": [1, 2]},
    "no hexadecimal": {"memory_handle": "zz"},
    "an odd digit": {"event_handle": "abc"},
    "null": {"device_uuid": None},
    "negative": {"storage_offset_bytes": -1},
    "beyond the storage": {"num_bytes": 1025},
    "an endless handle": {"memory_handle": "00" * 2000},
    "no handle": {"memory_handle": ""},
    "one more": {"pickled": "gASV"},
}


@pytest.mark.parametrize("case", WRONG_FIELDS)
def test_fields_that_are_no_handle(case: str) -> None:
    fields = CudaIpcHandle.from_reduction(reduction(), UUID).to_fields()
    with pytest.raises(EngineRequestError, match="CUDA IPC handle"):
        CudaIpcHandle.from_fields(fields | WRONG_FIELDS[case])


def test_missing_fields_and_no_fields() -> None:
    fields = CudaIpcHandle.from_reduction(reduction(), UUID).to_fields()
    fields.pop("device_uuid")
    for values in (fields, {}, None, "gASV", [1]):
        with pytest.raises(EngineRequestError, match="CUDA IPC handle"):
            CudaIpcHandle.from_fields(values)  # type: ignore[arg-type]


@pytest.mark.parametrize("variable", ALLOCATOR_VARIABLES)
@pytest.mark.parametrize(
    "text",
    ["expandable_segments:True", "max_split_size_mb:64, Expandable_Segments : true ,x:1"],
)
def test_expandable_segments_are_refused(
    variable: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineConfigError, match=rf"{variable} asks for them.*Remove"):
        check_allocator({variable: text})
    monkeypatch.setenv(variable, text)
    with pytest.raises(EngineConfigError, match="expandable"):
        CudaIpcTransport(1 << 20, 1)


def test_other_allocator_settings_are_fine() -> None:
    check_allocator({})
    check_allocator({ALLOCATOR_VARIABLES[1]: "expandable_segments:False,max_split_size_mb:64"})


def test_memory_of_an_expandable_segment_shows_in_its_handle() -> None:
    """It may have been switched on after the start, by torch's own function."""
    with pytest.raises(EngineConfigError, match="expandable segments"):
        CudaIpcHandle.from_reduction(reduction(storage_handle=b"\x02e" + bytes(80)), UUID)

# SPDX-License-Identifier: Apache-2.0
"""A short form of tools/fuzz.py, and one test for each fault that the long form has found."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron.rl.checkpoint.random_state import restore_random_state
from megatron.rl.checkpoint.run_state import read_file
from megatron.rl.config import load_config
from megatron.rl.data.problem_files import read_problems
from megatron.rl.errors import UserError
from megatron.rl.model.architecture import parse_architecture, read_architecture
from megatron.rl.plain_files import parse_yaml, read_json_object
from megatron.rl.rollout.checkpoint_index import read_checkpoint_index, read_safetensors_header
from megatron.rl.rollout.errors import EngineConfigError
from megatron.rl.rollout.records.record_file import METADATA_KEY, write_record
from megatron.rl.rollout.records.record_folder import RecordFolder
from megatron.rl.weights.hf_files import HFTensors
from tests.checkpoints import QWEN3
from tools.fuzz import run_target
from tools.fuzzing.mutations import damaged_bytes, damaged_text, damaged_tree
from tools.fuzzing.records import small_record
from tools.fuzzing.targets import SHARES

GOOD = "model: {path: m}\ntask: {name: t}\n"


@pytest.mark.parametrize(
    ("target", "inputs"),
    [("record", 200), ("hf_config", 300), ("problem", 300)],
)
def test_a_few_hundred_inputs(target: str, inputs: int) -> None:
    result = run_target(target, seed=11, first=0, stop=inputs, quiet=True)
    assert result.faults == [], result.faults[0]["trace"]
    # Neither is everything refused, nor does damage go unnoticed.
    assert result.inputs == inputs and 0 < result.accepted < inputs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "inputs"), [("config", 400), ("checkpoint", 200), ("reward", 1000)]
)
def test_more_of_the_slower_targets(target: str, inputs: int) -> None:
    result = run_target(target, seed=12, first=0, stop=inputs, quiet=True)
    assert result.faults == [], result.faults[0]["trace"]
    assert result.inputs == inputs and 0 < result.accepted < inputs


def test_shares_are_of_a_hundred() -> None:
    assert sum(SHARES.values()) == 100


def test_damage_is_seeded_and_is_damage() -> None:
    data = bytes(range(200))
    tree = {"a": [1, 2, {"b": "c"}], "d": None}
    for seed in range(200):
        once, again = random.Random(seed), random.Random(seed)
        assert damaged_bytes(once, data) == damaged_bytes(again, data)
        assert repr(damaged_tree(once, tree)) == repr(damaged_tree(again, tree))
        assert damaged_text(once, "a: b\nc: d\n") == damaged_text(again, "a: b\nc: d\n")
    changed = sum(damaged_bytes(random.Random(seed), data) != data for seed in range(200))
    assert changed > 180
    assert tree == {"a": [1, 2, {"b": "c"}], "d": None}, "the good input stays as it is"


def test_what_counts_as_a_fault(tmp_path: Path) -> None:
    """In a process of its own: the guard is for good."""
    code = """
import random, subprocess, sys, threading, time
from pathlib import Path
from tools.fuzzing import child
from tools.fuzzing.guard import Guard
class Planted:
    limit_s = 0.5
    def __init__(self, deed):
        self._deed = deed
    def attempt(self, rng):
        self._deed()
        return True
inside, outside = Path(sys.argv[1]) / "in", Path(sys.argv[1]) / "out"
inside.mkdir(), outside.mkdir()
guard = Guard(inside)
def swallowed(path):
    try:
        path.write_text("x")
    except OSError:
        pass
def thread():
    one = threading.Thread(target=lambda: 1 / 0); one.start(); one.join()
deeds = {
    "fine": lambda: (inside / "x").write_text("x"),
    "raises": lambda: {}["x"],
    "hangs": lambda: time.sleep(30),
    "writes": lambda: swallowed(outside / "x"),
    "removes": lambda: (outside / "kept").unlink(missing_ok=True),
    "starts": lambda: subprocess.run(["true"]),
    "thread": thread,
}
for name, deed in deeds.items():
    fault, accepted = child._attempt(Planted(deed), random.Random(0), guard)
    print(name, accepted, fault and fault["kind"])
    guard.taken()
print(guard.enforced, (outside / "x").exists())
"""
    root = Path(__file__).resolve().parents[2]
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[:4] == [
        "fine True None", "raises False KeyError", "hangs False Hang", "writes False Forbidden"
    ]  # fmt: skip
    assert lines[4] == "removes False Forbidden" and lines[6] == "thread False ZeroDivisionError"
    assert lines[5].startswith("starts False") and lines[5] != "starts False None"
    enforced, written = lines[7].split()
    assert enforced == "False" or written == "False"


# ---- faults that were found, each by the place that mends it -------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe\x00",  # UnicodeDecodeError
        b"run: {name: 2001-99-99}",  # ValueError of a date that does not exist
        b"run: {seed: " + b"9" * 5000 + b"}",  # ValueError of a number too long
        b"[" * 1100,  # RecursionError
        b"a: {b: " * 3000,  # minutes
        b"run: {name: !!timestamp x}",  # AttributeError
        b"run: {export: !!bool x}",  # KeyError
        b"megatron: {transformer: &a {x: *a}}",  # a circle
    ],
)
def test_damaged_yaml(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"config\.yaml"):
        load_config(path)


@pytest.mark.parametrize("text", ["2001-99-99", "[" * 1100, "9" * 5000, "*a"])
def test_an_override_that_is_no_yaml_is_text(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(GOOD)
    config = load_config(tmp_path / "config.yaml", [f"run.name={text}"])
    assert config.run.name == text


def test_a_file_name_that_is_too_long(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"base: {'x' * 5000}")
    with pytest.raises(UserError, match="no such config file"):
        load_config(tmp_path / "config.yaml")
    with pytest.raises(UserError, match=r"model\.path"):
        read_architecture("x" * 5000)


def test_a_circle_of_base_files_over_another_way(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "config.yaml").write_text("base: sub/../config.yaml")
    with pytest.raises(UserError, match="form a circle"):
        load_config(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    ("override", "setting"),
    [
        ("parallel.expert=0", "parallel.expert"),  # was a ZeroDivisionError
        ("parallel.data=1000000000", "parallel.data"),  # was a list of all ranks
        ("rollout.engine_args={tensor_parallel_size: x}", "tensor_parallel_size"),
        ("rollout.engine_args={gpu_memory_utilization: [1]}", "gpu_memory_utilization"),
        ("rollout.engines_per_node=1000000000", "rollout.engines_per_node"),
        (
            "rollout.engine_args={tensor_parallel_size: 1024, data_parallel_size: 1024}",
            "at most 1024 GPUs",
        ),
    ],
)
def test_sizes_that_cannot_be_counted_with(tmp_path: Path, override: str, setting: str) -> None:
    (tmp_path / "config.yaml").write_text(GOOD)
    with pytest.raises(UserError, match=setting):
        load_config(tmp_path / "config.yaml", [override])


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 100_000, b"1" * 5000])
def test_damaged_json(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"config\.json"):
        read_json_object(path)
    with pytest.raises(EngineConfigError, match=r"config\.json"):
        read_checkpoint_index(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", None), ("num_attention_heads", 0), ("hidden_size", "64"),
        ("num_hidden_layers", True), ("intermediate_size", 2**40), ("rms_norm_eps", [1]),
        ("rope_theta", "x"), ("rope_theta", float("nan")), ("rope_parameters", "x"),
        ("model_type", ["qwen3"]), ("head_dim", -1),
    ],
)  # fmt: skip
def test_an_architecture_that_is_none(key: str, value: object) -> None:
    with pytest.raises(UserError, match=key):
        parse_architecture(QWEN3 | {key: value})


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"\x02" + bytes(7) + b"[]"])
def test_damaged_safetensors(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"model\.safetensors"), HFTensors(tmp_path):
        pass
    with pytest.raises(EngineConfigError, match=r"model\.safetensors"):
        read_safetensors_header(path)


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}, {"a": "../x"}, {"a": "x" * 5000}])
def test_a_damaged_index_of_weights(tmp_path: Path, weight_map: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(EngineConfigError, match=r"model\.safetensors\.index\.json"):
        read_checkpoint_index(tmp_path)


def test_parts_of_a_batch_with_other_columns(tmp_path: Path) -> None:
    for engine in (0, 1):
        write_record(tmp_path / f"train-000001-engine{engine}.parquet", small_record(engine))
    path = tmp_path / "train-000001-engine1.parquet"
    table = pq.read_table(path)
    info = json.loads(table.schema.metadata[METADATA_KEY.encode()])
    info["settings"]["top_logprobs"] = 0
    pq.write_table(table.replace_schema_metadata({METADATA_KEY: json.dumps(info)}), path)
    with pytest.raises(UserError, match=r"engine1\.parquet is not of the same batch"):
        RecordFolder(tmp_path).batch("train", 1)


def test_small_files_of_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(b"\xff")
    for name in ("run.json", "absent.json", "."):
        with pytest.raises(UserError, match="cannot be read"):
            read_file(tmp_path / name)
    state = {"python": [3, [2**70] * 625, None], "numpy": [], "torch": "", "megatron": {}}
    with pytest.raises(UserError, match="no state of random number generators"):
        restore_random_state(json.dumps(state), "random.json")


def test_texts_of_a_parquet_file_that_are_no_utf8(tmp_path: Path) -> None:
    path = tmp_path / "problems.parquet"
    text = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
    )
    pq.write_table(pa.table({"problem": ["x"], "answer": text}), path)
    with pytest.raises(UserError, match="cannot be read to its end"):
        read_problems(path)


def test_a_column_whose_name_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "problems.parquet"
    pq.write_table(pa.table({"problem": ["x"], "answer": ["y"]}), path)
    path.write_bytes(path.read_bytes().replace(b"problem", b"prob\xffem"))
    with pytest.raises(UserError, match="not a Parquet file that can be read"):
        read_problems(path)


def test_yaml_of_plain_values() -> None:
    assert parse_yaml("{a: [1, x], b: 2001-01-01}", "x")["a"] == [1, "x"]

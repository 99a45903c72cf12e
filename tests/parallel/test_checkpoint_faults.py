# SPDX-License-Identifier: Apache-2.0
"""What goes wrong with checkpoints on one rank, and that all ranks go on together."""

from __future__ import annotations

import contextlib
import random
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoints import QWEN3, write_checkpoint
from tests.parallel.checkpoint_case import global_state, policy_in, run_state, train, writer_for
from tests.parallel.spawn import run_ranks

LAYOUT = {"data": 2}
Outcomes = dict[str, Any]


def all_scenarios(rank: int, world_size: int, root: str) -> dict[str, Outcomes]:
    from megatron.rl import cpu_backend

    cpu_backend.install()
    from megatron.core import parallel_state

    outcomes = {}
    for scenario in (failures, asynchronous, damage):
        policy = policy_in(f"{root}/model", LAYOUT, "bfloat16")
        train(policy, 1)
        outcomes[scenario.__name__] = scenario(policy, Path(root) / scenario.__name__, rank)
        parallel_state.destroy_model_parallel()
    return outcomes


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Outcomes]]:
    root = tmp_path_factory.mktemp("faults")
    config = QWEN3 | {"num_hidden_layers": 1}
    write_checkpoint(root / "model", config)
    write_checkpoint(root / "other", config | {"intermediate_size": 128})
    results: list[dict[str, Outcomes]] = run_ranks(all_scenarios, 2, str(root), timeout_s=300.0)
    return results


@contextlib.contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """Let this process write no larger files, as a full disk or a quota would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def failures(policy, folder: Path, rank: int) -> Outcomes:  # type: ignore[no-untyped-def]
    """Write on a full disk, to a lost folder, with names twice, and where there is no room."""
    from megatron.rl.checkpoint.reader import find_newest
    from megatron.rl.errors import UserError

    writer = writer_for(policy, str(folder))
    writer.start()
    reports = {"good": writer.save(run_state(1))}
    with file_size_limit(30_000) if rank == 1 else contextlib.nullcontext():
        reports["full"] = writer.save(run_state(2))
    reports["twice"] = writer.save(run_state(3), extra={"same": lambda path: path.touch()})
    reports["missing"] = writer.save(
        run_state(4), extra={f"of-{rank}": (lambda path: None) if rank else Path.touch}
    )
    greedy = writer_for(policy, str(folder), min_free_gib=1e9)
    with pytest.raises(UserError) as refused:
        greedy.start()
    reports["no room"] = greedy.save(run_state(5))
    if rank == 0:
        (folder / "nowhere").mkdir()
        (folder / "nowhere" / "checkpoints").touch()
    nowhere = writer_for(policy, str(folder / "nowhere"))
    with pytest.raises(UserError) as not_a_folder:
        nowhere.start()
    reports["lost"] = nowhere.save(run_state(5))
    after_failures = sorted(path.name for path in (folder / "checkpoints").iterdir())
    train(policy, 1, first=1)
    reports["again"] = writer.save(
        run_state(6), extra={f"of-{rank}": lambda path: path.write_text(f"rank {rank}")}
    )
    found = find_newest(folder)
    assert found is not None
    own = found.extra_file(f"of-{rank}")
    return {
        "reports": reports,
        "refused": str(refused.value),
        "not a folder": str(not_a_folder.value),
        "after failures": after_failures,
        "found": found.path.name,
        "extra": None if own is None else own.read_text(),
        "no extra": found.extra_file("of-9"),
    }


def test_failed_saves_leave_the_older_one(ranks: list[dict[str, Outcomes]]) -> None:
    for rank, outcome in enumerate(of_rank["failures"] for of_rank in ranks):
        reports = outcome["reports"]
        assert reports["good"].error is None and reports["again"].error is None
        for name, reason in {
            "full": "rank 1",
            "twice": "two ranks",
            "missing": "rank 1: [Errno 2]",
            "no room": "checkpoint.min_free_gib",
            "lost": "rank 0: [Errno",
        }.items():
            assert reports[name].path is None and reason in reports[name].error, reports[name]
            assert "training goes on" in reports[name].message()
        assert "File too large" in reports["full"].error, reports["full"].error
        assert "checkpoint.min_free_gib" in outcome["refused"]
        assert "checkpoint.every" in outcome["not a folder"]
        assert outcome["after failures"] == ["step-000001"], "a failed one left something behind"
        assert outcome["found"] == "step-000006"
        assert outcome["extra"] == f"rank {rank}" and outcome["no extra"] is None


def asynchronous(policy, folder: Path, rank: int) -> Outcomes:  # type: ignore[no-untyped-def]
    """Train while a checkpoint is being written, which a gate holds back on one rank."""
    import torch.distributed as dist

    from megatron.rl.checkpoint.reader import find_newest

    writer = writer_for(policy, str(folder), async_save=True, keep=1)
    writer.start()
    gate = threading.Event()

    def wait(path: Path) -> None:
        assert gate.wait(60)
        path.write_text("opened")

    before = global_state(policy)
    started = writer.save(run_state(1), extra={"gate": wait} if rank == 1 else {})
    train(policy, 1, first=1)
    early = writer.collect()  # rank 0 has long written its part
    found_early = find_newest(folder)
    dist.barrier()
    gate.set()
    report = None
    while report is None:
        report = writer.collect()
    after = global_state(policy)
    # The next one finishes the one before.
    nothing = writer.save(run_state(2))
    second = writer.save(run_state(3))
    drawn = draws()
    third = writer.finish()
    assert writer.finish() is None and writer.collect() is None
    dist.barrier()  # rank 0 has waited for the deletions
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    other = writer_for(policy, str(folder / "other"), async_save=True)
    other.start()
    other.save(run_state(1))
    other.finish()
    with file_size_limit(30_000) if rank == 1 else contextlib.nullcontext():
        other.save(run_state(2))
        failed = other.finish()
    assert report.path is not None
    loaded = policy_loaded_from(folder, policy)
    drawn_again = draws()
    return {
        "before": before, "after": after, "loaded": loaded, "started": started, "early": early,
        "found early": found_early, "first": report, "nothing": nothing, "second": second,
        "third": third, "names": names, "failed": failed, "drawn": (drawn, drawn_again),
        "other": sorted(path.name for path in (folder / "other" / "checkpoints").iterdir()),
    }  # fmt: skip


def draws() -> list[float]:
    """A number from every generator that a checkpoint restores."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        of_megatron = float(torch.rand(()))
    return [random.random(), float(np.random.rand()), float(torch.rand(())), of_megatron]


def policy_loaded_from(folder: Path, policy):  # type: ignore[no-untyped-def]
    from megatron.rl.checkpoint.reader import find_newest

    for chunk in policy.chunks:
        for parameter in chunk.parameters():
            parameter.data.zero_()
    found = find_newest(folder)
    assert found is not None
    found.load_into(policy)
    return global_state(policy)


def test_training_goes_on_while_a_copy_is_written(ranks: list[dict[str, Outcomes]]) -> None:
    results = [of_rank["asynchronous"] for of_rank in ranks]
    for outcome in results:
        for name in ("started", "early", "found early", "nothing"):
            assert outcome[name] is None, name
        for name, step in (("first", 1), ("second", 2), ("third", 3)):
            report = outcome[name]
            assert report.step == step and report.error is None, report
            assert report.nbytes > 0 and report.blocked_s > 0 and report.write_s > 0
            assert report.metrics().keys() == {
                f"checkpoint/{key}" for key in ("failed", "bytes", "blocked_s", "write_s")
            }
        assert outcome["names"] == ["step-000003"], "keep=1"
        assert "rank 1" in outcome["failed"].error
        assert outcome["other"] == ["step-000001"]
        drawn, drawn_again = outcome["drawn"]
        assert drawn == drawn_again, "generators were not restored"
    first = results[0]
    assert any(not torch.equal(first["before"][key], first["after"][key]) for key in first["after"])
    for key, tensor in first["after"].items():
        assert torch.equal(first["loaded"][key], tensor), key


def damage(policy, folder: Path, rank: int) -> Outcomes:  # type: ignore[no-untyped-def]
    """Flip bytes of what was saved, load weights alone, and another model."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron.rl.checkpoint.reader import find_newest
    from megatron.rl.errors import UserError

    assert find_newest(folder) is None
    writer = writer_for(policy, str(folder), keep=3)
    writer.start()
    for step in (1, 2, 3):
        report = writer.save(run_state(step))
        assert report is not None and report.error is None
    state = global_state(policy)
    checkpoints = folder / "checkpoints"
    if rank == 0:
        flip_middle(checkpoints / "step-000003" / "__1_0.distcp")
        (checkpoints / "step-000002" / "random-00001.json").unlink()
    dist.barrier()
    found = find_newest(folder)
    assert found is not None

    # Weights alone, into an optimizer that has moved on: at lr 0 the next step changes nothing.
    train(policy, 1, first=1)
    policy.scheduler.max_lr = policy.scheduler.min_lr = 0.0
    for group in policy.optimizer.param_groups:
        group["max_lr"] = group["min_lr"] = 0.0
    found.load_weights_into(policy)
    taken = train(policy, 1, first=2)
    at_lr_0 = {name: tensor for name, tensor in global_state(policy).items() if "." in name}

    parallel_state.destroy_model_parallel()
    other = policy_in(str(folder.parent / "other"), LAYOUT, "bfloat16")
    with pytest.raises(UserError) as another:
        found.load_into(other)
    dist.barrier()
    if rank == 0:
        flip_middle(checkpoints / "step-000001" / "run.json")
    dist.barrier()
    with pytest.raises(UserError) as none_left:
        find_newest(folder)
    return {
        "explain": found.explain(), "state": state, "at lr 0": at_lr_0, "lr": taken[0][0],
        "another model": str(another.value), "none left": str(none_left.value),
    }  # fmt: skip


def flip_middle(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_damaged_ones_are_passed_over(ranks: list[dict[str, Outcomes]]) -> None:
    results = [of_rank["damage"] for of_rank in ranks]
    for outcome in results:
        assert outcome["explain"] == (
            "continuing from step-000001; passed over step-000003: __1_0.distcp is not what was "
            "saved: its digest differs; passed over step-000002: random-00001.json is missing"
        )
        assert "cannot be loaded into this model" in outcome["another model"]
        assert "mlp" in outcome["another model"]
        assert all(f"step-00000{step}" in outcome["none left"] for step in (1, 2, 3))
        assert outcome["lr"] == 0.0
    weights = {n: t for n, t in results[0]["state"].items() if not n.startswith("optimizer.")}
    assert weights
    for name, tensor in weights.items():
        assert torch.equal(results[0]["at lr 0"][name], tensor), name

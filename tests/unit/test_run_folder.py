# SPDX-License-Identifier: Apache-2.0
"""Which folder a run may use, who else is in it, and what may differ when it goes on."""

import dataclasses
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from megatron.rl import run_lock
from megatron.rl.config import Config, load_config, parse_config
from megatron.rl.errors import UserError
from megatron.rl.run_folder import (
    create_run_folder,
    new_run_folder,
    open_run_folder,
    write_result,
)
from megatron.rl.run_settings import FREE_SETTINGS, changed_settings, settings_digest

BASE: dict[str, Any] = {"run": {"device": "cpu"}, "model": {"path": "m"}, "task": {"name": "t"}}


def config(**sections: dict[str, Any]) -> Config:
    return parse_config({**BASE, **sections})


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "LOCK_WAIT_S", 0.0)


def leave(opened: Any) -> None:
    opened.lock.release()


def test_a_new_run_in_exactly_that_folder(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "run"
    opened = open_run_folder(folder, config())
    assert opened.path == folder and opened.finished is None
    assert load_config(folder / "config.yaml") == config()


def test_one_run_at_a_time(tmp_path: Path) -> None:
    opened = open_run_folder(tmp_path, config())
    with pytest.raises(UserError, match=f"under way .*process {os.getpid()} on"):
        open_run_folder(tmp_path, config())
    leave(opened)
    leave(open_run_folder(tmp_path, config()))


def test_the_lock_lasts_as_long_as_anyone_who_inherited_it(tmp_path: Path) -> None:
    """The ranks of a launcher that was killed may still be there for a moment."""
    opened = open_run_folder(tmp_path, config())
    inherited = os.dup(opened.lock.descriptor)  # type: ignore[union-attr]
    leave(opened)
    with pytest.raises(UserError, match="under way"):
        open_run_folder(tmp_path, config())
    os.close(inherited)
    leave(open_run_folder(tmp_path, config()))


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(run_lock.errno.ENOTSUP, "not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    leave(open_run_folder(tmp_path, config()))


def test_folders_of_others_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"expected an empty folder or a run in .* notes.txt"):
        open_run_folder(tmp_path, config())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt"]
    with pytest.raises(UserError, match="run folder"):
        open_run_folder(tmp_path / "notes.txt", config())
    others = create_run_folder(config(run={"device": "cpu", "folder": str(tmp_path / "runs")}))
    with pytest.raises(UserError, match="not made by pdm-rl train"):
        open_run_folder(others, config())


@pytest.mark.parametrize("left", [[], ["lock"], ["lock", "environment.json", "logs"]])
def test_a_run_that_was_killed_while_it_began(tmp_path: Path, left: list[str]) -> None:
    for name in left:
        (tmp_path / name).touch()
    leave(open_run_folder(tmp_path, config()))


def test_settings_that_decide_what_is_trained_stay(tmp_path: Path) -> None:
    leave(open_run_folder(tmp_path, config()))
    other = config(loss={"threshold": 0.3}, train={"learning_rate": 1.0})
    with pytest.raises(UserError, match=r"has train.learning_rate 1e-06, .* got 1.0: .*--allow-c"):
        open_run_folder(tmp_path, other)
    leave(open_run_folder(tmp_path, other, allow_changed=True))
    assert load_config(tmp_path / "config.yaml") == other
    assert load_config(tmp_path / "config.1.yaml") == config()


def test_layout_length_and_measuring_may_differ(tmp_path: Path) -> None:
    leave(open_run_folder(tmp_path, config()))
    other = config(
        parallel={"data": 2},
        train={"rollouts": 500, "micro_batch_tokens": 99},
        rollout={"threads": 3, "engine_args": {"max_num_batched_tokens": 512}},
        eval={"every": 7},
        checkpoint={"every": 3},
        records={"write": True},
    )
    leave(open_run_folder(tmp_path, other))
    assert load_config(tmp_path / "config.yaml") == other
    assert settings_digest(other) == settings_digest(config())


def test_a_setting_that_is_new_or_gone_differs() -> None:
    plain, more = config(), config(megatron={"optimizer": {"adam_beta1": 0.5}})
    (change,) = changed_settings(plain, more)
    assert change.name == "megatron.optimizer.adam_beta1"
    assert (change.before, change.now) == (None, 0.5)
    assert [c.now for c in changed_settings(more, plain)] == [None]
    assert settings_digest(plain) != settings_digest(more)


def test_free_settings_exist() -> None:
    tree = dataclasses.asdict(config())
    for name in FREE_SETTINGS:
        section, _, setting = name.partition(".")
        assert section in tree and (not setting or setting in tree[section]), name


def test_a_finished_run_does_nothing_unless_it_is_made_longer(tmp_path: Path) -> None:
    ten, twenty = (config(train={"rollouts": rollouts}) for rollouts in (10, 20))
    opened = open_run_folder(tmp_path, ten)
    write_result(tmp_path, 10, "reward: 0 -> 1")
    leave(opened)
    for _ in range(2):
        opened = open_run_folder(tmp_path, ten)
        assert (
            opened.finished is not None and "reward: 0 -> 1; finished after 10" in opened.finished
        )
        leave(opened)
    opened = open_run_folder(tmp_path, twenty)
    assert opened.finished is None and not (tmp_path / "result.json").exists()


def test_new_folders_never_collide(tmp_path: Path) -> None:
    settings = config(run={"device": "cpu", "folder": str(tmp_path)})
    opened = [new_run_folder(settings) for _ in range(3)]
    assert len({run.path for run in opened}) == 3

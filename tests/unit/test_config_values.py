# SPDX-License-Identifier: Apache-2.0
"""`pdm-rl show`: what scripts read of a resolved config."""

from pathlib import Path

import pytest

from megatron.rl.cli import main

RECIPES = Path(__file__).parents[2] / "examples" / "rl"
E2E = str(RECIPES / "qwen3_30b_fp8_e2e.yaml")


def test_values_are_resolved_and_one_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["run.device", "parallel.world_size", "rollout.python", "run.name", "model.path"]
    keys += ["rollout.engine_args.tensor_parallel_size", "eval.benches", "megatron.optimizer"]
    changes = ["--set", "parallel.data=4", "--set", "run.name='a  b # c'"]
    cluster = ["--with", str(RECIPES / "cluster" / "h200_141gb.yaml")]
    assert main(["show", E2E, *changes, *cluster, *keys]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "cuda",
        "16",  # tensor 4 x data 4
        "null",
        "a  b # c",
        "Qwen3-30B-A3B-Base",
        "4",
        '["aime24", "aime25"]',
        '{"adam_beta1": 0.9, "adam_beta2": 0.98}',
    ]


def test_a_text_of_several_lines_stays_on_one(capsys: pytest.CaptureFixture[str]) -> None:
    text = '"{question}\\nAnswer:\\n"'
    assert main(["show", E2E, "--set", f"task.template={text}", "task.template", "run.seed"]) == 0
    assert capsys.readouterr().out.splitlines() == [text, "1"]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("parallel.word_size", "did you mean parallel.world_size?"),
        ("nowhere.at_all", "unknown setting nowhere.at_all; known: run, model,"),
        ("run.name.first", "run.name is a value"),
        ("parallel.check", "unknown setting parallel.check"),  # a method
    ],
)
def test_an_unknown_key_is_the_users_mistake(
    capsys: pytest.CaptureFixture[str], key: str, words: str
) -> None:
    assert main(["show", E2E, "run.device", key]) == 2
    output = capsys.readouterr()
    assert output.out == "" and words in output.err and output.err.count("\n") == 1

# SPDX-License-Identifier: Apache-2.0
"""The config file: what it accepts, refuses, and says."""

from pathlib import Path

import pytest

from megatron.rl.config import dump_config, load_config, parse_config
from megatron.rl.errors import UserError

MINIMAL = "model: {path: some/model}\ntask: {name: reasoning_gym/chain_sum}\n"


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(MINIMAL)
    return path


def test_defaults_and_overrides(config_file: Path) -> None:
    config = load_config(
        config_file,
        ["loss.direction=exact", "train.learning_rate=1e-6", "rollout.engine_args={a: 1}"],
    )
    assert config.loss.direction == "exact"
    assert config.train.learning_rate == 1e-6  # YAML 1.1 reads 1e-6 as text
    assert config.rollout.engine_args == {"a": 1}
    assert config.rollout.top_logprobs == 20


def test_resolved_config_reads_back_equal(config_file: Path, tmp_path: Path) -> None:
    config = load_config(config_file, ["loss.ratio_cap=3", "parallel.sequence=false"])
    saved = tmp_path / "saved.yaml"
    saved.write_text(dump_config(config))
    assert load_config(saved) == config


def test_base_file_is_merged_section_by_section(config_file: Path, tmp_path: Path) -> None:
    child = tmp_path / "child.yaml"
    child.write_text("base: config.yaml\nmodel: {dtype: float32}\nloss: {threshold: 0.05}\n")
    config = load_config(child)
    assert config.model.path == "some/model"
    assert config.model.dtype == "float32"
    assert config.loss.threshold == 0.05


def test_base_circle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("base: a.yaml\n")
    with pytest.raises(UserError, match="circle"):
        load_config(path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("loss.treshold=0.1", r"unknown setting loss\.treshold; did you mean loss\.threshold\?"),
        ("nonsense=1", r"unknown setting nonsense"),
        ("loss.mask=banana.peel", r"banana"),
        ("loss.direction=sideways", r"loss.*direction"),
        ("train.epochs=many", r"train\.epochs: .* got 'many'"),
        ("train.epochs=1.5", r"train\.epochs"),
        ("run.device=tpu", r"run\.device"),
        ("model=here", r"model: expected a section"),
        ("loss.threshold.deep=1", r"deep|threshold"),
        ("rollout.top_p=0.9", r"rollout\.top_p is 0\.9, expected 1\.0: .*support"),
        ("rollout.top_k=50", r"rollout\.top_k"),
        ("rollout.min_p=0.1", r"rollout\.min_p"),
        ("rollout.top_logprobs=4000", r"rollout\.top_logprobs: expected 1 to 512"),
        ("rollout.top_logprobs=0", r"rollout\.top_logprobs"),
        ("rollout.temperature=0", r"rollout\.temperature"),
        ("scoring.timeout_s=0", r"scoring\.timeout_s: expected 0\.1 to 3600"),
        ("scoring.timeout_s=.inf", r"scoring\.timeout_s: expected 0\.1 to 3600"),
        ("scoring.workers=0", r"scoring\.workers: expected 1 to 256"),
        ("scoring.memory_mib=1", r"scoring\.memory_mib: expected 16 to"),
        ("scoring.responses_per_worker=0", r"scoring\.responses_per_worker: expected a positive"),
        ("scoring.timeout=3", r"unknown setting scoring\.timeout; did you mean .*timeout_s"),
        ("rollout.engine=replay", r"rollout\.replay_from: expected the folder rollouts of a run"),
        ("rollout.replay_from=x", r"rollout\.replay_from: .* no effect with rollout\.engine vllm"),
        (
            "rollout={engine: replay, replay_from: x, sleep: true}",
            r"rollout\.sleep: expected false with rollout\.engine replay",
        ),
        ("records.keep=2", r"records\.keep: .* no effect unless records\.write is true"),
        ("records={write: true, keep: -1}", r"records\.keep: expected 0 \(keep all\) or more"),
        ("bridge.bucket_mib=0", r"bridge\.bucket_mib: expected a positive number"),
        ("bridge.probe_sequences=0", r"bridge\.probe_sequences: expected a positive number"),
        ("bridge.probe_tokens=1", r"bridge\.probe_tokens: expected 2 to 10239"),
        (
            "rollout={max_prompt_tokens: 20, max_response_tokens: 12}",
            r"bridge\.probe_tokens: expected 2 to 31, below rollout\.max_prompt_tokens",
        ),
        ("bridge.probe_tolerance=0", r"bridge\.probe_tolerance: expected a positive number"),
        (
            "bridge={certificate: digests, probe_tolerance: 0.1}",
            r"bridge\.probe_tolerance: .* no effect without",
        ),
        ("bridge.scales=float32", r"bridge\.scales: .* no effect unless bridge\.quantization"),
        ("train.minibatch_prompts=65", r"train\.minibatch_prompts: expected at most .*64"),
        ("train.learning_rate=-1", r"train\.learning_rate"),
        ("model.path=", r"model\.path"),
        ("no-equals-sign", r"expected key=value"),
    ],
)
def test_refusals_name_the_setting(config_file: Path, override: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_config(config_file, [override])
    assert "\n" not in str(caught.value)


def test_broken_yaml_and_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such config file"):
        load_config(tmp_path / "absent.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1,\n")
    with pytest.raises(UserError, match="not valid YAML"):
        load_config(broken)
    broken.write_text("- a list\n")
    with pytest.raises(UserError, match="expected sections"):
        load_config(broken)


def test_recipes_of_the_repository_are_valid() -> None:
    recipes = sorted((Path(__file__).parents[2] / "examples" / "rl").glob("*.yaml"))
    assert recipes
    for recipe in recipes:
        load_config(recipe)


def test_flagship_has_the_values_of_table_1() -> None:
    """Paper, appendix E.1, Table 1, column Qwen3-30B-A3B-Base."""
    recipe = Path(__file__).parents[2] / "examples" / "rl" / "qwen3_30b_fp8_e2e.yaml"
    config = load_config(recipe)
    assert config.train.learning_rate == 1e-6
    assert config.train.epochs == 1
    assert config.rollout.max_prompt_tokens == 2048
    assert config.rollout.max_response_tokens == 8192
    assert config.rollout.prompts == 128
    assert config.train.minibatch_prompts == 16
    assert config.rollout.temperature == 1.0
    assert config.rollout.group_size == 16
    assert config.rollout.top_logprobs == 20
    assert config.loss.threshold == 0.15


def test_unknown_key_in_a_nested_dict_of_megatron_is_left_to_megatron() -> None:
    tree = {
        "model": {"path": "x"},
        "task": {"name": "y"},
        "megatron": {"transformer": {"recompute_granularity": "full"}},
    }
    assert parse_config(tree).megatron.transformer == {"recompute_granularity": "full"}

# SPDX-License-Identifier: Apache-2.0
"""The recipes against the papers' numbers, written out here; how recipes and presets combine."""

import dataclasses
from pathlib import Path

import pytest

from megatron.rl.cli import main
from megatron.rl.config import Config, load_config
from megatron.rl.errors import UserError
from megatron.rl.model.architecture import parse_architecture
from megatron.rl.planning.rates import GPUS, Assumptions, Cluster
from megatron.rl.planning.run_plan import make_plan
from megatron.rl.weights.engine_layout import check_engine_layout
from megatron.rl.weights.names import hf_shapes
from megatron.rl.weights.plan import plan_weights
from tests.real_models import RECIPE_MODELS

RECIPES = Path(__file__).parents[2] / "examples" / "rl"
MASKS, CLUSTERS = RECIPES / "masks", RECIPES / "cluster"

# Table 1 of the paper on predictive divergence masks (appendix E.1), row by row; one column a
# model. Both precisions of the third model have its values.
COLUMNS = ("qwen3_4b", "qwen3_8b", "qwen3_30b_fp8_rollout", "qwen3_30b_fp8_e2e")
TABLE_1 = {
    "train.learning_rate": (1e-6, 1e-6, 1e-6, 1e-6),
    "train.epochs": (1, 1, 1, 1),
    "rollout.max_prompt_tokens": (2048, 2048, 2048, 2048),
    "rollout.max_response_tokens": (8192, 8192, 8192, 8192),
    "rollout.prompts": (64, 128, 128, 128),
    "train.minibatch_prompts": (16, 16, 16, 16),
    "rollout.temperature": (1.0, 1.0, 1.0, 1.0),
    "rollout.group_size": (8, 16, 16, 16),
    "rollout.top_logprobs": (20, 20, 20, 20),
    "loss.threshold": (0.15, 0.15, 0.15, 0.15),
}


def recipe(name: str, *presets: Path) -> Config:
    return load_config(RECIPES / f"{name}.yaml", presets=presets)


def _value(config: Config, key: str) -> object:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


@pytest.mark.parametrize("column", range(len(COLUMNS)), ids=COLUMNS)
def test_table_1(column: int) -> None:
    config = recipe(COLUMNS[column])
    found = {key: _value(config, key) for key in TABLE_1}
    assert found == {key: row[column] for key, row in TABLE_1.items()}
    # Text of the paper: AIME24 and AIME25, 16 responses to a problem.
    assert (config.eval.benches, config.eval.samples) == (["aime24", "aime25"], 16)
    assert config.task.name == "math"


def test_precisions() -> None:
    """BF16 by default; FP8 in the engine alone, or in both with the same blocks and scales."""
    found = {
        name: (c.model.dtype, c.model.fp8, c.bridge.quantization, c.bridge.scales)
        for name in COLUMNS
        for c in [recipe(name)]
    }
    assert found == {
        "qwen3_4b": ("bfloat16", "none", "none", "power_of_two"),
        "qwen3_8b": ("bfloat16", "none", "none", "power_of_two"),
        "qwen3_30b_fp8_rollout": ("bfloat16", "none", "block_fp8", "power_of_two"),
        "qwen3_30b_fp8_e2e": ("bfloat16", "blockwise", "block_fp8", "power_of_two"),
    }


def test_trust_region_masking() -> None:
    """Section 5 of that paper: group 16, batch 32, 1e-6; AIME25 avg@32, top-p 0.95, temperature 1.

    The only mask is the one over whole sequences.
    """
    config = recipe("trm_qwen3_8b")
    assert (config.rollout.group_size, config.rollout.prompts) == (16, 32)
    assert config.train.learning_rate == 1e-6
    assert config.train.minibatch_prompts == 32  # one step a batch: pi = mu but for the engine
    ev = config.eval
    assert (ev.benches, ev.samples, ev.top_p, ev.temperature) == (["aime25"], 32, 0.95, 1.0)
    assert config.loss.mask == "none"
    assert config.loss.sequence_mask is not None
    assert config.loss.sequence_mask.criterion == "max"


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ("dppo_topk_kl", ("divergence", "topk_kl", "ratio")),
        ("predictive_aggregated", ("divergence", "topk_kl", "aggregated")),
        ("predictive_uniform", ("divergence", "topk_kl", "uniform")),
        ("predictive_exact", ("divergence", "topk_kl", "exact")),
        ("predictive_certified", ("divergence", "topk_kl", "certified")),
    ],
)
def test_divergence_masks_combine_with_thresholds(
    name: str, mask: str, expected: tuple[str, ...]
) -> None:
    for threshold in (0.15, 0.05):
        loss = recipe(name, MASKS / f"{mask}.yaml", MASKS / f"delta_{threshold}.yaml").loss
        assert (loss.mask, loss.divergence, loss.direction) == expected
        assert loss.threshold == threshold
        assert loss.sequence_mask is None


def test_clip_higher_has_no_dual_clip() -> None:
    loss = recipe("qwen3_30b_fp8_e2e", MASKS / "grpo_clip_higher.yaml").loss
    assert (loss.mask, loss.clip_low, loss.clip_high) == ("ratio_clip", 0.2, 0.28)
    assert (loss.dual_clip, loss.ratio_cap) == (None, None)


@pytest.mark.parametrize("name", ["qwen3_8b", "trm_qwen3_8b"])
def test_masks_change_the_loss_and_nothing_else(name: str) -> None:
    plain = recipe(name)
    for mask in sorted(MASKS.glob("*.yaml")):
        masked = recipe(name, mask)
        assert dataclasses.replace(masked, loss=plain.loss) == plain, mask.name
        if not mask.name.startswith("delta"):
            # A mask is the same whatever it replaces.
            assert masked.loss == recipe("qwen3_4b", mask).loss
            assert (masked.loss.sequence_mask is not None) == mask.name.startswith("trm")


@pytest.mark.parametrize("name", RECIPE_MODELS)
@pytest.mark.parametrize("gpu", ["h20", "h100", "h200"])
def test_every_recipe_fits_every_card_by_its_plan(name: str, gpu: str) -> None:
    (overlay,) = CLUSTERS.glob(f"{gpu}_*.yaml")
    config = recipe(name, overlay)
    gpus = config.parallel.world_size
    cluster = Cluster(gpus, 8, GPUS[gpu].memory_gib, GPUS[gpu], Assumptions())
    plan = make_plan(config, parse_architecture(RECIPE_MODELS[name]), cluster, 4096)
    assert plan.problems == ()
    assert plan.engines * 8 == gpus * config.rollout.engines_per_node
    # The longest sequence must fit into a micro-batch without breaking it open.
    assert config.train.micro_batch_tokens >= 2048 + 8192 - 1


@pytest.mark.parametrize("name", RECIPE_MODELS)
def test_weights_reach_the_engine_exactly_once(name: str) -> None:
    """The plan checks itself: every element of every Hugging Face tensor has one source."""
    config, model = recipe(name), parse_architecture(RECIPE_MODELS[name])
    plan = plan_weights(model, config.parallel, "transformer_engine")
    plan.check()
    assert {tensor.name: tensor.shape for tensor in plan.tensors} == {
        name: shape
        for name, shape in hf_shapes(model).items()
        if name != "lm_head.weight" or not model.tied_embeddings
    }
    arguments = config.rollout.engine_args
    check_engine_layout(
        model,
        arguments.get("tensor_parallel_size", 1),
        config.bridge.quantization,
        expert_parallel=arguments.get("enable_expert_parallel", False),
    )


def test_an_engine_that_cuts_fp8_blocks_is_refused_with_the_sizes_that_do_not() -> None:
    """768 FFN columns over 4 GPUs are 192, one block and a half."""
    with pytest.raises(UserError) as caught:
        check_engine_layout(parse_architecture(RECIPE_MODELS["qwen3_30b_fp8_e2e"]), 4, "block_fp8")
    message = str(caught.value)
    assert "192 FFN columns" in message and "block 128" in message
    assert "possible sizes are 1, 2" in message
    assert "enable_expert_parallel, which keeps experts whole: 1, 2, 4, 8" in message


def test_the_tiny_run_is_the_recipe_but_for_its_size() -> None:
    full, tiny = recipe("qwen3_30b_fp8_e2e"), recipe("qwen3_30b_fp8_e2e_tiny")
    differing = set()
    for field in dataclasses.fields(Config):
        ours, theirs = getattr(tiny, field.name), getattr(full, field.name)
        if not dataclasses.is_dataclass(ours):
            continue
        differing |= {
            f"{field.name}.{f.name}"
            for f in dataclasses.fields(ours)
            if getattr(ours, f.name) != getattr(theirs, f.name)
        }
    assert differing == {
        "run.name", "run.device", "model.path",
        "task.name", "task.params", "task.exact",
        "parallel.data", "parallel.tensor", "parallel.expert",
        "rollout.max_prompt_tokens", "rollout.max_response_tokens",
        "rollout.sleep", "rollout.engines_per_node", "rollout.engine_args", "bridge.transport",
        "train.rollouts", "train.learning_rate",
        "eval.prompts", "eval.every", "eval.benches", "eval.data",
    }  # fmt: skip
    assert tiny.model.fp8 == "blockwise" and tiny.bridge.quantization == "block_fp8"


def _write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


BASE = "model: {path: some/model}\ntask: {name: reasoning_gym/chain_sum}\n"


def test_of_several_bases_the_later_wins_and_the_file_itself_last(tmp_path: Path) -> None:
    _write(tmp_path, "a.yaml", BASE + "train: {epochs: 2}\nloss: {threshold: 0.1, clip_low: 0.3}\n")
    _write(tmp_path, "deep/c.yaml", "base: d.yaml\n")
    _write(tmp_path, "deep/d.yaml", "loss: {threshold: 0.2, clip_high: 0.4}\n")
    child = _write(tmp_path, "b.yaml", "base: [a.yaml, deep/c.yaml]\nloss: {clip_high: 0.5}\n")
    config = load_config(child)
    assert config.train.epochs == 2
    loss = config.loss
    assert (loss.threshold, loss.clip_low, loss.clip_high) == (0.2, 0.3, 0.5)


def test_presets_come_after_the_file_and_before_overrides(tmp_path: Path) -> None:
    config = _write(tmp_path, "a.yaml", BASE + "loss: {threshold: 0.1}\n")
    one = _write(tmp_path, "one.yaml", "loss: {threshold: 0.2, clip_low: 0.3}\n")
    two = _write(tmp_path, "two.yaml", "loss: {threshold: 0.3}\n")
    loss = load_config(config, presets=[one, two]).loss
    assert (loss.threshold, loss.clip_low) == (0.3, 0.3)
    assert load_config(config, ["loss.threshold=0.4"], [one]).loss.threshold == 0.4


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("base: [a.yaml, b.yaml]\n", "base files form a circle"),
        ("base: {a: 1}\n", r"base: expected a file or a list of files, got \{'a': 1\}"),
        ("base: [missing.yaml]\n", "no such config file: .*missing.yaml"),
    ],
)
def test_bases_that_are_refused(tmp_path: Path, base: str, message: str) -> None:
    _write(tmp_path, "a.yaml", BASE)
    with pytest.raises(UserError, match=message):
        load_config(_write(tmp_path, "b.yaml", base))


def test_with_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", str(RECIPES / "quickstart.yaml"), "--dry-run"]
    assert main([*arguments, "--with", str(MASKS / "grpo_clip_higher.yaml")]) == 0
    assert "mask: ratio_clip" in capsys.readouterr().out

# SPDX-License-Identifier: Apache-2.0
"""FP8 settings: the fields of Megatron they become, what is refused, what a machine must have."""

from dataclasses import fields
from pathlib import Path

import pytest
from megatron.core.fp8_utils import get_fp8_align_size
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.rl.config import Config, load_config
from megatron.rl.errors import UserError
from megatron.rl.model.fp8 import (
    SCALES_VARIABLE,
    FP8Settings,
    check_transformer_options,
    distributed_fields,
    fp8_settings,
    input_multiple,
    require_same_scales,
    scales_environment,
    transformer_fields,
)
from megatron.rl.model.fp8_requirements import Platform, require_fp8_support
from megatron.rl.parallel import ParallelConfig

MINIMAL = "model: {path: some/model}\ntask: {name: reasoning_gym/chain_sum}\n"
BLOCKWISE = FP8Settings("blockwise")
HOPPER = Platform("2.9.0", (9, 0), (12, 9))


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(MINIMAL)
    return path


def config(path: Path, *overrides: str) -> Config:
    return load_config(path, overrides)


def test_settings_come_from_the_model_and_the_bridge(config_file: Path) -> None:
    assert fp8_settings(config(config_file)) == FP8Settings()
    settings = fp8_settings(
        config(
            config_file,
            "model.fp8=blockwise",
            "model.fp8_format=hybrid",
            "model.fp8_params=true",
            "model.fp8_skip_first=1",
            "model.fp8_skip_last=2",
            "bridge.scales=float32",
        )
    )
    assert settings == FP8Settings("blockwise", "hybrid", True, 1, 2, "float32")
    assert [settings.quantizes_layer(layer, 6) for layer in range(6)] == [
        False, True, True, True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.fp8=fancy"], r"model\.fp8"),
        (["model.fp8_format=hybrid"], r"model\.fp8_format: .* no effect while model\.fp8 is none"),
        (["model.fp8_params=true"], r"model\.fp8_params: .* no effect"),
        (["model.fp8_skip_last=1"], r"model\.fp8_skip_last: .* no effect"),
        (["model.fp8=blockwise", "model.fp8_skip_first=-1"], r"model\.fp8_skip_first: .*0 or more"),
        (["model.fp8=delayed", "model.fp8_skip_first=1"], r"delayed scaling covers all layers"),
        (["model.fp8=mxfp8", "run.device=cpu"], r"model\.fp8: .*blockwise or none with run\.dev"),
        (
            ["model.fp8=blockwise", "model.fp8_params=true", "run.device=cpu"],
            r"model\.fp8_params: expected false with run\.device cpu",
        ),
        (
            ["model.fp8=blockwise", "model.fp8_params=true",
             "megatron.ddp={use_distributed_optimizer: false}"],
            r"model\.fp8_params: .*use_distributed_optimizer",
        ),
        (["megatron.ddp={fp8_param_gather: true}"], r"fp8_param_gather: .*model\.fp8_params"),
        (["bridge.scales=float32"], r"bridge\.scales: .*model\.fp8 is blockwise"),
        (["bridge.scales=float32", "model.fp8=mxfp8"], r"bridge\.scales"),
    ],
)  # fmt: skip
def test_settings_without_effect_or_sense_are_refused(
    config_file: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        config(config_file, *overrides)


def test_fields_are_megatrons_own() -> None:
    known = {f.name for f in fields(TransformerConfig)}
    settings = FP8Settings("mxfp8", "hybrid", params=True, skip_first=1, skip_last=0)
    assert transformer_fields(settings, is_moe=True) == {
        "fp8": "hybrid",
        "fp8_recipe": "mxfp8",
        "fp8_param": True,
        "first_last_layers_bf16": True,
        "num_layers_at_start_in_bf16": 1,
        "num_layers_at_end_in_bf16": 0,
        "moe_router_padding_for_quantization": True,
    }
    assert set(transformer_fields(settings, is_moe=True)) <= known
    assert transformer_fields(FP8Settings(), is_moe=True) == {}
    assert "moe_router_padding_for_quantization" not in transformer_fields(BLOCKWISE, is_moe=False)
    assert distributed_fields(settings) == {"fp8_param_gather": True}
    assert distributed_fields(BLOCKWISE) == {}


@pytest.mark.parametrize("recipe", ["blockwise", "delayed", "tensorwise", "mxfp8"])
def test_megatron_takes_the_fields(recipe: str) -> None:
    skip = 0 if recipe == "delayed" else 1
    settings = FP8Settings(recipe, skip_first=skip)  # type: ignore[arg-type]
    built = TransformerConfig(
        num_layers=4,
        hidden_size=128,
        num_attention_heads=2,
        **transformer_fields(settings, is_moe=False),
    )
    assert (built.fp8, built.fp8_recipe) == ("e4m3", recipe)


@pytest.mark.parametrize(
    ("options", "settings", "emulated", "message"),
    [
        ({"fp8": "e4m3"}, BLOCKWISE, False, r"is set from model\.fp8 and model\.fp8_format"),
        ({"fp8_recipe": "mxfp8"}, BLOCKWISE, False, r"is set from model\.fp8;"),
        ({"fp8_param": True}, FP8Settings(), False, r"is set from model\.fp8_params"),
        ({"first_last_layers_bf16": True}, BLOCKWISE, False, r"model\.fp8_skip_first"),
        ({"fp8_margin": 1}, FP8Settings(), False, r"no effect while model\.fp8 is none"),
        ({"fp8_wgrad": False}, BLOCKWISE, False, r"no effect with model\.fp8 blockwise"),
        ({"fp8_dot_product_attention": True}, BLOCKWISE, False, r"no effect with model\.fp8 block"),
        (
            {"fp8_output_proj": True},
            FP8Settings("mxfp8"),
            False,
            r"no effect with model\.fp8 mxfp8",
        ),
        ({"moe_router_padding_for_quantization": False}, BLOCKWISE, True, r"no effect on CPU"),
        ({"moe_router_padding_for_fp8": True}, FP8Settings(), False, r"no effect while"),
    ],
)
def test_options_that_contradict_or_do_nothing_are_refused(
    options: dict[str, object], settings: FP8Settings, emulated: bool, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_transformer_options(options, settings, emulated=emulated)


def test_other_options_pass() -> None:
    check_transformer_options({"moe_router_fusion": False}, FP8Settings(), emulated=True)
    check_transformer_options(
        {"moe_router_padding_for_quantization": False}, BLOCKWISE, emulated=False
    )
    check_transformer_options(
        {"fp8_dot_product_attention": True}, FP8Settings("tensorwise"), emulated=False
    )
    check_transformer_options(
        {"fp8_margin": 1, "fp8_amax_history_len": 16}, FP8Settings("delayed"), emulated=False
    )


@pytest.mark.parametrize("recipe", ["blockwise", "delayed", "tensorwise", "mxfp8"])
def test_micro_batches_are_as_long_as_products_need(recipe: str) -> None:
    built = TransformerConfig(
        num_layers=2, hidden_size=128, num_attention_heads=2, fp8="e4m3", fp8_recipe=recipe
    )
    alone = input_multiple(ParallelConfig(), built)
    assert alone % get_fp8_align_size(built.fp8_recipe) == 0
    assert input_multiple(ParallelConfig(tensor=4), built) == 4 * alone
    assert input_multiple(ParallelConfig(tensor=4, sequence=False), built) == alone
    plain = TransformerConfig(num_layers=2, hidden_size=128, num_attention_heads=2)
    assert input_multiple(ParallelConfig(tensor=4), plain) == 4
    assert input_multiple(ParallelConfig(), plain) == 1


def test_the_environment_says_what_the_bridge_says() -> None:
    float32 = FP8Settings("blockwise", scales="float32")
    assert scales_environment(BLOCKWISE, {}) == {SCALES_VARIABLE: "0"}
    assert scales_environment(float32, {}) == {SCALES_VARIABLE: "1"}
    assert scales_environment(float32, {SCALES_VARIABLE: "1"}) == {SCALES_VARIABLE: "1"}
    assert scales_environment(FP8Settings("mxfp8"), {SCALES_VARIABLE: "1"}) == {}
    for settings, found in ((BLOCKWISE, "1"), (float32, "0")):
        with pytest.raises(UserError, match=rf"{SCALES_VARIABLE} is {found} .*bridge\.scales is"):
            scales_environment(settings, {SCALES_VARIABLE: found})


def test_what_was_imported_is_compared_with_the_bridge() -> None:
    require_same_scales(BLOCKWISE, True)
    require_same_scales(FP8Settings("blockwise", scales="float32"), False)
    with pytest.raises(UserError, match=f"float32 scales: set {SCALES_VARIABLE}=0"):
        require_same_scales(BLOCKWISE, False)


@pytest.mark.parametrize(
    ("recipe", "platform", "message"),
    [
        ("blockwise", Platform(None, (9, 0), (12, 9)), r"Engine 2\.3 or newer, found none"),
        ("blockwise", Platform("2.2.0", (9, 0), (12, 9)), r"Engine 2\.3 or newer, found 2\.2\.0"),
        ("delayed", Platform("1.9", (9, 0), (12, 9)), r"Engine 1\.11 or newer"),
        ("blockwise", Platform("2.9", (8, 9), (12, 9)), r"9\.0 \(Hopper\) or newer, found 8\.9"),
        ("blockwise", Platform("2.9", None, (12, 9)), r"9\.0 \(Hopper\) or newer, found none"),
        ("blockwise", Platform("2.9", (9, 0), (12, 8)), r"CUDA 12\.9 or newer, found 12\.8"),
        ("mxfp8", HOPPER, r"10\.0 \(Blackwell\) up to, not including, 12\.0, found 9\.0"),
        ("mxfp8", Platform("2.9", (12, 0), (13, 0)), r"found 12\.0"),
        ("tensorwise", Platform("2.9", (8, 0), (12, 9)), r"8\.9 \(Ada\)"),
    ],
)
def test_what_is_missing_is_named(recipe: str, platform: Platform, message: str) -> None:
    with pytest.raises(UserError, match=rf"model\.fp8 {recipe}: .*{message}"):
        require_fp8_support(FP8Settings(recipe), platform)  # type: ignore[arg-type]


def test_what_is_there_passes() -> None:
    blackwell = Platform("2.3.0+abc", (10, 0), (13, 0))
    require_fp8_support(BLOCKWISE, HOPPER)
    require_fp8_support(BLOCKWISE, blackwell)
    require_fp8_support(FP8Settings("mxfp8"), blackwell)
    require_fp8_support(FP8Settings(), Platform(None, None, None))
    with pytest.raises(UserError, match="only powers of two on Blackwell"):
        require_fp8_support(FP8Settings("blockwise", scales="float32"), blackwell)

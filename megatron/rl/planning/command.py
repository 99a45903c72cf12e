# SPDX-License-Identifier: Apache-2.0
"""``pdm-rl plan``: print what a config would need, and whether it fits."""

import argparse
import json
import os
from pathlib import Path

from megatron.rl.config import Config, load_config
from megatron.rl.errors import UserError
from megatron.rl.model.architecture import Architecture, parse_architecture, read_architecture
from megatron.rl.plain_files import read_json_object
from megatron.rl.planning.engine_memory import EngineShape
from megatron.rl.planning.layout_search import suggest_layout
from megatron.rl.planning.memory import placement_of
from megatron.rl.planning.rates import GPUS, Assumptions, Cluster, nearest_gpu, read_rates
from megatron.rl.planning.report import json_report, text_report
from megatron.rl.planning.run_plan import make_plan, settled_device

EXIT_FITS, EXIT_DOES_NOT_FIT = 0, 1


def run_plan(options: argparse.Namespace) -> int:
    """Run the command; return 0 where the run fits and 1 where it does not."""
    config = settled_device(load_config(options.config, options.overrides, options.presets))
    model = _architecture(config, options.model_config)
    cluster = _cluster(config, options)
    response_tokens = options.response_tokens or config.rollout.max_response_tokens // 2
    if not 0 < response_tokens <= config.rollout.max_response_tokens:
        raise UserError(
            f"--response-tokens: expected 1 to rollout.max_response_tokens "
            f"({config.rollout.max_response_tokens}), got {response_tokens}"
        )
    plan = make_plan(config, model, cluster, response_tokens)
    suggestion = None
    if plan.problems and config.run.device != "cpu":
        suggestion = suggest_layout(config, model, cluster, response_tokens)
    if options.json:
        print(json.dumps(json_report(plan, suggestion), indent=2))
    else:
        print(text_report(plan, suggestion))
    return EXIT_DOES_NOT_FIT if plan.problems else EXIT_FITS


def _architecture(config: Config, model_config: str | None) -> Architecture:
    if model_config is not None:
        if not os.path.isfile(model_config):
            raise UserError(f"--model-config {model_config}: No such file")
        try:
            return parse_architecture(read_json_object(Path(model_config)))
        except UserError as error:
            raise UserError(f"--model-config {model_config}: {error}") from None
    if not (Path(config.model.path) / "config.json").is_file():
        raise UserError(
            f"model.path: {config.model.path} has no config.json here; name one with "
            "--model-config FILE (a plan needs no weights)"
        )
    return read_architecture(config.model.path)


def _cluster(config: Config, options: argparse.Namespace) -> Cluster:
    for name in ("gpus", "gpu_memory", "gpus_per_node"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise UserError(f"--{name.replace('_', '-')}: expected a positive number, got {value}")
    if options.gpu is not None and options.gpu not in GPUS:
        raise UserError(f"--gpu: expected one of {', '.join(GPUS)}, got {options.gpu}")
    gpu = GPUS[options.gpu] if options.gpu else nearest_gpu(options.gpu_memory or 0.0)
    if options.gpu is None and options.gpu_memory is None:
        gpu = GPUS["h20"]
    assumptions = Assumptions()
    if options.rates is not None:
        gpu, assumptions = read_rates(options.rates, gpu)
    memory = options.gpu_memory or gpu.memory_gib
    cluster = Cluster(options.gpus or 1, options.gpus_per_node, memory, gpu, assumptions)
    if options.gpus is not None:
        return cluster
    needed = config.parallel.world_size
    if placement_of(config, cluster) == "own GPUs":
        needed += config.rollout.engines_per_node * EngineShape.of(config).gpus
    return Cluster(needed, options.gpus_per_node, memory, gpu, assumptions)

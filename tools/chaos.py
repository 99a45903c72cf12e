#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Kill a tiny run at random moments, continue it each time, and see that nothing was lost.

    tools/chaos.sh --kills 200                     forked ranks that replay rollouts
    tools/chaos.sh --kills 12 --engine vllm --ranks 2

One run is made that nobody kills. Then runs of the same settings are sent SIGKILL while they start,
sample, train, send weights, save, evaluate and export, and are continued by ``pdm-rl resume`` or by
``pdm-rl train --run-folder`` until they have finished: exported weights, metrics without times, and
the newest checkpoint have to be the same, bit for bit. A run that has finished is followed by a new
one until there were enough kills. Exit code 1 where anything was lost, left behind or different.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tools.kills.campaign import Campaign, Plan  # noqa: E402
from tools.kills.starts import Starter  # noqa: E402

DEFAULT_ROLLOUTS = 4
CONFIG = """
run: {{name: chaos, device: cpu, folder: {folder}}}
model: {{path: {model}, dtype: float32}}
task: {{name: "tools.kills.parity_task:ParityTask"}}
rollout: {{prompts: 8, group_size: 4, max_prompt_tokens: 64, max_response_tokens: 12}}
train:
  rollouts: {rollouts}
  minibatch_prompts: 2
  epochs: 2
  learning_rate: 1.0e-3
  schedule: linear
  warmup_steps: 5
loss: {{threshold: 0.01}}
eval: {{prompts: 16, every: 2}}
checkpoint: {{every: 1}}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign that the command line asks for; return the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    forked = options.engine == "replay" and options.start != "launch"
    if options.start == "fork" and not forked:
        parser.error("--start fork needs --engine replay: an engine takes its time to start")
    if options.config and (options.model or options.rollouts):
        parser.error("--model and --rollouts are settings of the config")
    folder = Path(options.folder or tempfile.mkdtemp(prefix="pdm-rl-chaos-")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    _say(f"all files are in {folder}")
    starter = Starter(forked, options.ranks, folder)
    starter.prepare()
    settings = _settings(options, folder)
    reference = folder / "reference"
    _uninterrupted(starter, settings, reference)
    # Behind the preparations: they set what imports go by.
    from megatron.rl.config import load_config
    from megatron.rl.policy.from_config import steps_per_batch

    steps = steps_per_batch(load_config(reference / "config.yaml"))
    plan = Plan(folder, options.kills, options.seed, settings, steps, reference)
    started = time.monotonic()
    campaign = Campaign(plan, starter, _say)
    campaign.run()
    _say(f"{time.monotonic() - started:.0f} s")
    print(summary(campaign), flush=True)
    if campaign.faults:
        return 1
    if not options.folder:
        shutil.rmtree(folder)
    return 0


def _settings(options: argparse.Namespace, folder: Path) -> list[str]:
    """Return the arguments of ``pdm-rl train``; makes the model and the records that it needs."""
    config = folder / "config.yaml"
    if options.config:
        config.write_text(Path(options.config).read_text())
    else:
        model = Path(options.model).resolve() if options.model else _make_model(folder / "model")
        rollouts = options.rollouts or DEFAULT_ROLLOUTS
        config.write_text(CONFIG.format(folder=folder / "runs", model=model, rollouts=rollouts))
    settings = [str(config)]
    for dimension in ("tensor", "expert"):
        settings += ["--set", f"parallel.{dimension}={options.ranks}"]
    if options.engine == "vllm":
        return settings
    if options.records:
        records = Path(options.records).resolve()
    else:
        recorded = folder / "recorded"
        launched = Starter(False, options.ranks, folder)
        _uninterrupted(launched, [*settings, "--set", "records.write=true"], recorded)
        records = recorded / "rollouts"
    return [*settings, "--set", "rollout.engine=replay", "--set", f"rollout.replay_from={records}"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools/chaos.sh", description="Kill a tiny run at random moments and continue it."
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", choices=("replay", "vllm"), default="replay")
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=1, help="tensor and expert")
    parser.add_argument("--rollouts", type=int, help=f"of a run; default {DEFAULT_ROLLOUTS}")
    parser.add_argument("--config", help="of other runs than tiny ones of a word task")
    parser.add_argument(
        "--start",
        choices=("fork", "launch"),
        default=None,
        help="fork ranks that have imported everything, or launch pdm-rl (default with vllm)",
    )
    parser.add_argument("--model", help="a tiny model's folder; default: one is made")
    parser.add_argument("--records", help="rollouts to replay; default: a run is recorded")
    parser.add_argument(
        "--folder",
        help="for all files, and continues what is there; default: a new one, removed at the end",
    )
    return parser


def summary(campaign: Campaign) -> str:
    """Return kills by phase and by victim, what was lost at most, and the verdict, as Markdown."""
    kills = campaign.kills
    runs = [record for record in campaign.records if record["kind"] == "finished"]
    lines = [
        "| killed during | kills | while a checkpoint was written behind | lost steps, at most |",
        "|---|---|---|---|",
    ]
    for phase, _ in Counter(kill["phase"] for kill in kills).most_common():
        lines.append(_row(phase, [kill for kill in kills if kill["phase"] == phase]))
    lines.append(_row("all", kills))
    victims = Counter(kill["victim"] for kill in kills).most_common()
    hows = Counter(record["how"] for record in campaign.records).most_common()
    same = sum(not run["faults"] for run in runs)
    lines += [
        "",
        f"killed: {', '.join(f'{name} {count}' for name, count in victims)}",
        f"started by: {', '.join(f'{name} {count}' for name, count in hows)}",
        f"finished runs identical to the one that nobody killed: {same} of {len(runs)}",
        f"faults: {len(campaign.faults)}",
    ]
    return "\n".join(lines)


def _row(name: str, kills: Sequence[Mapping[str, Any]]) -> str:
    saving = sum(kill["saving"] for kill in kills)
    lost = max((kill["steps"] - kill["saved"] for kill in kills), default=0)
    return f"| {name} | {len(kills)} | {saving} | {lost} |"


def _make_model(folder: Path) -> Path:
    from tools.make_tiny_model import TinyModelSettings, make_tiny_model

    if not folder.exists():
        make_tiny_model(folder, TinyModelSettings(steps=0), say=lambda text: None)
    return folder


def _uninterrupted(starter: Starter, settings: Sequence[str], run: Path) -> None:
    """Make a run that nobody kills, unless it is there."""
    if (run / "result.json").exists():
        return
    _say(f"making {run.name}, which nobody kills")
    started = time.monotonic()
    process = starter.start(["train", *settings, "--run-folder", str(run)], run.name)
    while (code := process.poll()) is None:
        time.sleep(0.1)
    if code != 0:
        sys.exit(f"{run.name} ended with {code}:\n{process.output.read_text()}")
    _say(f"{run.name} took {time.monotonic() - started:.1f} s")


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())

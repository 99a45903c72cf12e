# SPDX-License-Identifier: Apache-2.0
"""``pdm-rl data prepare`` on the command line."""

import argparse
from pathlib import Path

from megatron.rl.data.prompt_template import add_template_arg


def add_data_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``data prepare`` to the command line."""
    data = commands.add_parser("data", help="problem files for training")
    prepare = data.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "prepare", help="deduplicate and filter published problem files"
    )
    prepare.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="Parquet, JSON or JSON Lines; a folder of them; or hf:ORG/NAME",
    )
    prepare.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to make")
    prepare.add_argument("--name", help="for the card (default: the folder's)")
    prepare.add_argument("--licence", default="see source", help="for the card")
    prepare.add_argument(
        "--columns", metavar="text=A,answer=B", help="columns of an unknown layout, or its name"
    )
    prepare.add_argument(
        "--answers",
        choices=("integer", "any"),
        default="any",
        help="integer: keep problems with an integer answer only",
    )
    prepare.add_argument(
        "--no-cjk", action="store_true", help="drop Chinese, Japanese and Korean problems"
    )
    prepare.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="FILE",
        help="problems that must not be trained on, for example aime24.jsonl; may be repeated",
    )
    prepare.add_argument("--model", metavar="DIR", help="folder whose tokenizer counts prompts")
    prepare.add_argument("--max-prompt-tokens", type=int, metavar="N", help="drop longer prompts")
    prepare.add_argument(
        "--format",
        metavar="NAME",
        help="as task.params.format: its instruction counts too",
    )
    prepare.add_argument("--template", default="auto", help="as task.template")
    prepare.add_argument("--system-prompt", metavar="TEXT", help="as task.system_prompt")
    add_template_arg(prepare)
    prepare.add_argument("--seed", type=int, help="shuffle (default: keep the order)")
    prepare.add_argument("--force", action="store_true", help="replace a prepared folder")
    prepare.set_defaults(command=_prepare)


def _prepare(options: argparse.Namespace) -> int:
    # Imported here: they bring Arrow and a tokenizer, which no other command needs.
    from megatron.rl.data.prepare import PrepareSettings, prepare
    from megatron.rl.data.prepare_display import PrepareProgress, print_card

    settings = PrepareSettings(
        sources=tuple(options.sources),
        out=options.out,
        name=options.name,
        licence=options.licence,
        columns=options.columns,
        answers=options.answers,
        no_cjk=options.no_cjk,
        exclude=tuple(options.exclude),
        model=options.model,
        max_prompt_tokens=options.max_prompt_tokens,
        answer_format=options.format,
        template=options.template,
        system_prompt=options.system_prompt,
        template_args=dict(options.template_arg),
        seed=options.seed,
        force=options.force,
    )
    with PrepareProgress() as progress:
        card = prepare(settings, progress.draw)
    print_card(card, options.out)
    return 0

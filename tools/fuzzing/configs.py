# SPDX-License-Identifier: Apache-2.0
"""Config files, presets and overrides, through ``pdm-rl train --dry-run``."""

import contextlib
import io
import json
import random
import shutil
from pathlib import Path
from typing import Any

import yaml

from megatron.rl import cli
from tools.fuzzing.mutations import ODD_TEXTS, ODD_VALUES, damaged_bytes, damaged_text, damaged_tree
from tools.fuzzing.target import WrongAnswer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "rl"
_FRAGMENTS = (
    "base: x.yaml\n", "base: [a, b]\n", "base: fuzzed.yaml\n", "loss:\n", "  mask: divergence\n",
    "&a ", "*a", "&a [*a]", "<<: *a\n", "!!python/object/apply:os.system ['true']", "? ", "- ",
    "---\n", "...\n", "!!binary x", "!!timestamp 2001-99-99", "2001-13-45", "0b", "1_0", ".inf",
    ".nan", "~", "|\n", ">\n", "%YAML 9.9\n", "{}", "[]", "1:60:60", "=",
)  # fmt: skip


class Configs:
    """The whole way from a command line to the resolved config."""

    name = "config"
    limit_s = 60.0

    def prepare(self, folder: Path) -> None:
        """Copy the project's own config files."""
        for path in EXAMPLES.rglob("*.yaml"):
            target = folder / path.relative_to(EXAMPLES)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
        self._folder = folder
        self._fuzzed = folder / "fuzzed.yaml"
        self._texts = [path.read_text() for path in sorted(folder.glob("*.yaml"))]
        self._presets = [str(path) for path in sorted((folder / "masks").glob("*.yaml"))]
        self._settings = sorted(
            {setting for text in self._texts for setting in _settings(yaml.safe_load(text))}
        )
        self._fuzzed.write_text(self._texts[0])
        if not self._dry_run([str(self._fuzzed)]):
            raise WrongAnswer("the good config was refused")

    def attempt(self, rng: random.Random) -> bool:
        """Damage a file, the command line, or both."""
        text = rng.choice(self._texts)
        arguments = [str(self._fuzzed)]
        what = rng.randrange(6)
        if what in (0, 1):
            text = damaged_text(rng, text, _FRAGMENTS)
        elif what == 2:
            tree = damaged_tree(rng, yaml.safe_load(text))
            try:
                text = yaml.dump(tree, Dumper=yaml.CSafeDumper, allow_unicode=rng.random() < 0.5)
            except UnicodeEncodeError:  # half of a character: JSON has an escape for it
                text = json.dumps(tree)
        elif what == 3:
            self._fuzzed.write_bytes(damaged_bytes(rng, text.encode()))
            return self._dry_run(arguments)
        if what >= 4 or rng.random() < 0.2:
            for _ in range(rng.choice((1, 1, 2))):
                arguments.append(f"--set={self._override(rng)}")
        if rng.random() < 0.1:
            arguments.append(f"--with={rng.choice([*self._presets, str(self._fuzzed), '', '/'])}")
        self._fuzzed.write_text(text, encoding="utf-8", errors="surrogatepass")
        return self._dry_run(arguments)

    def close(self) -> None:
        """Nothing is open."""

    def _override(self, rng: random.Random) -> str:
        setting = rng.choice(self._settings)
        value = rng.choice(ODD_VALUES)
        text = value if isinstance(value, str) else json.dumps(value)
        whole = f"{setting}={rng.choice((text, rng.choice(ODD_TEXTS)))}"
        return damaged_text(rng, whole, edits=1) if rng.random() < 0.3 else whole

    def _dry_run(self, arguments: list[str]) -> bool:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main(["train", "--dry-run", *arguments])
        lines = err.getvalue().strip().splitlines()
        if code == 2 and len(lines) >= 1 and lines[0].startswith("error: "):
            return False
        if code != 0 or lines:
            raise WrongAnswer(f"exit code {code}, said {err.getvalue()[:300]!r}")
        return True


def _settings(tree: Any, prefix: str = "") -> list[str]:
    names = []
    for key, value in tree.items() if isinstance(tree, dict) else ():
        names += [f"{prefix}{key}", *_settings(value, f"{prefix}{key}.")]
    return names

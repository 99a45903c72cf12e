# SPDX-License-Identifier: Apache-2.0
"""What the installed ``megatron.training`` imports of ``megatron.rl`` is here, and is what it uses.

Read from Megatron's sources: every name that they import from the package, every call's arguments,
and what they do with the value. A new release that asks for more fails here, not in a training
loop that swallowed an ImportError (training.py:195-206).
"""

import ast
import importlib
import importlib.util
import inspect
import re
import typing
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

PACKAGE = "megatron.rl"


@dataclass(frozen=True)
class Use:
    """One place where Megatron's source names something of this package."""

    module: str
    name: str
    file: str
    line: int
    call: ast.Call | None
    value: str
    """What becomes of it: "discarded", "= TARGET", "+= TARGET", or "read" where it is no call."""

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


def installed_sources() -> dict[str, str]:
    """Megatron's own modules as ``training/training.py`` -> source."""
    sources = {}
    for package in ("training", "core"):
        spec = importlib.util.find_spec(f"megatron.{package}")
        assert spec is not None and spec.submodule_search_locations
        root = Path(next(iter(spec.submodule_search_locations)))
        for path in sorted(root.rglob("*.py")):
            text = path.read_text()
            if PACKAGE in text:
                sources[f"{package}/{path.relative_to(root)}"] = text
    return sources


def imported_names(tree: ast.AST) -> dict[str, tuple[str, str | None]]:
    """Local name -> (module of this package, name in it or None for the module itself)."""
    names: dict[str, tuple[str, str | None]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                local = alias.asname or alias.name
                if node.module == PACKAGE:
                    names[local] = (f"{PACKAGE}.{alias.name}", None)
                elif node.module.startswith(f"{PACKAGE}."):
                    names[local] = (node.module, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                assert not alias.name.startswith(PACKAGE), "a form of import that is not read here"
    return names


def uses_in(file: str, text: str) -> list[Use]:
    tree = ast.parse(text)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    names = imported_names(tree)
    uses = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module, name = names.get(node.value.id, ("", None))
            if not module or name is not None:
                continue
            name = node.attr
        elif isinstance(node, ast.Name) and names.get(node.id, ("", None))[1] is not None:
            module, name = names[node.id]
        else:
            continue
        parent = parents[node]
        call = parent if isinstance(parent, ast.Call) and parent.func is node else None
        value = "read" if call is None else fate(parents[call])
        uses.append(Use(module, str(name), file, node.lineno, call, value))
    return uses


def fate(parent: ast.AST) -> str:
    match parent:
        case ast.Expr():
            return "discarded"
        case ast.Assign(targets=[target]):
            return f"= {ast.unparse(target)}"
        case ast.AugAssign(target=target):
            return f"+= {ast.unparse(target)}"
    return f"in {ast.unparse(parent)}"


SOURCES = installed_sources()
USES = [use for file, text in SOURCES.items() for use in uses_in(file, text)]
CALLS = [use for use in USES if use.call is not None]

# name -> what Megatron does with the value at each call, and the type that it therefore has to be.
# Read in the sources; test_values_are_used_as_read_here finds out when they change.
RETURNS: dict[str, tuple[tuple[str, ...], str]] = {
    # The data iterator of train_step, and the next call's buffered_rollouts. Megatron's rerun state
    # machine takes RerunDataIterator only, or a list with one for each model chunk.
    "get_grpo_data_iterator": (("= train_data_iterator",), "iterator"),
    "evaluate_and_print_results_rl": (("discarded", "discarded"), "None"),
    "_maybe_prefetch_separate_inference_model_weights": (("discarded", "discarded"), "None"),
    "rl_inference_interface_shutdown": (("discarded", "discarded"), "None"),
    # .items() go to writer.add_scalar, all of it to wandb.
    "get_sequence_packing_tensorboard_metrics": (("= packing_metrics",), "dict[str, float]"),
    "get_sequence_packing_log_info": (("+= log_string",), "str"),
    "log_rl_throughput_metrics": (("+= log_string",), "str"),
    # Added to args.consumed_train_samples.
    "get_iteration_sequence_count": (("= iteration_sequences",), "int"),
    "initialize_rl_profiler": (("discarded",), "None"),
    "log_iteration_profile": (("discarded",), "None"),
    "shutdown_rl_profiler": (("discarded",), "None"),
}

TYPES = {"None": type(None), "str": str, "int": int, "dict[str, float]": dict[str, float]}


def ids(use: Use) -> str:
    return f"{use.name}-{use.line}"


def function(use: Use) -> typing.Any:
    return getattr(importlib.import_module(use.module), use.name)


def test_something_is_read() -> None:
    assert list(SOURCES) == ["training/training.py"]
    assert {use.module for use in USES} == {"megatron.rl.rl_utils", "megatron.rl.rl_profiling"}
    assert len(CALLS) == sum(len(fates) for fates, _ in RETURNS.values())


@pytest.mark.parametrize("use", USES, ids=ids)
def test_name_exists(use: Use) -> None:
    assert hasattr(importlib.import_module(use.module), use.name), use.place


@pytest.mark.parametrize("use", CALLS, ids=ids)
def test_call_fits_the_signature(use: Use) -> None:
    assert use.call is not None
    signature = inspect.signature(function(use))
    loose = [
        p for p in signature.parameters.values() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    assert not loose, f"{use.name} takes anything ({loose[0]}): name Megatron's parameters"
    assert not any(isinstance(argument, ast.Starred) for argument in use.call.args)
    assert all(keyword.arg for keyword in use.call.keywords)
    signature.bind(*use.call.args, **{str(k.arg): k.value for k in use.call.keywords})


@pytest.mark.parametrize("use", CALLS, ids=ids)
def test_positional_arguments_have_the_names_that_megatron_gives_them(use: Use) -> None:
    """A parameter in another place would bind all the same, and take another value."""
    assert use.call is not None
    parameters = list(inspect.signature(function(use)).parameters)
    given = [ast.unparse(argument) for argument in use.call.args]
    aliases = {"rl_eval_model": "model", "inf_core": "model", "ref_state_dict": "ref_state_dict",
               "elapsed_time_per_iteration": "elapsed_s"}  # fmt: skip
    assert parameters[: len(given)] == [aliases.get(name, name) for name in given]


@pytest.mark.parametrize("name", RETURNS)
def test_values_are_used_as_read_here(name: str) -> None:
    assert tuple(use.value for use in CALLS if use.name == name) == RETURNS[name][0]


@pytest.mark.parametrize("name", RETURNS)
def test_value_is_what_megatron_uses(name: str) -> None:
    use = next(use for use in CALLS if use.name == name)
    known = importlib.import_module("megatron.rl.megatron_pretrain").__dict__
    hint = typing.get_type_hints(function(use), localns=known).get("return")
    expected = RETURNS[name][1]
    if expected == "iterator":
        iterator = known["MinibatchIterator"]
        assert issubclass(iterator, known["RerunDataIterator"])
        assert hint == iterator | list[iterator]
    else:
        assert hint == TYPES[expected]


def test_timer_names_are_strings() -> None:
    names = importlib.import_module("megatron.rl.rl_profiling").RL_LOGGABLE_TIMER_NAMES
    assert isinstance(names, list)  # training.py extends a list with it
    assert all(isinstance(name, str) for name in names)


def cited_lines(module: ModuleType) -> list[tuple[str, int]]:
    """(function, line) for every training.py line in the docstrings of a module's functions."""
    found = []
    for name, value in vars(module).items():
        if inspect.isfunction(value) and value.__module__ == module.__name__:
            for lines in re.findall(r"training\.py:([\d, ]+)", value.__doc__ or ""):
                found += [(name, int(line)) for line in re.findall(r"\d+", lines)]
    return found


@pytest.mark.parametrize("name", ["rl_utils", "rl_profiling"])
def test_cited_lines_are_those_of_the_calls(name: str) -> None:
    module = importlib.import_module(f"{PACKAGE}.{name}")
    calls = {(use.name, use.line) for use in CALLS if use.module == module.__name__}
    assert set(cited_lines(module)) == calls


# (file, line) that a comment of ours cites -> what stands there.
CITED = {
    ("training/initialize.py", 66): "Megatron requires CUDA",
    ("training/initialize.py", 155): "_compile_dependencies()",
    ("training/initialize.py", 282): "torch.cuda.set_device",
    ("training/initialize.py", 358): "device_count > 0",
    ("training/initialize.py", 447): "torch.cuda.device_count() > 0",
    ("training/initialize.py", 508): "bias = torch.rand(",
    ("training/training.py", 1091): "initialize_megatron(",
    ("training/training.py", 1117): "set_jit_fusion_options(",
    ("training/training.py", 1250): "context_parallel_size > 1",
    ("training/training.py", 1347): "inspect.signature(",
    ("training/training.py", 2744): "mem_stats[",
    ("training/training.py", 2818): "_snapshot()",
    ("training/training.py", 1492): "args.do_test",
    ("training/training.py", 2528): "opt_param_scheduler.step(",
    ("training/training.py", 3393): "args.perform_rl_step",
    ("training/training.py", 3408): "load_checkpoint(",
    ("training/training.py", 3735): "cudaProfilerStart",
    ("training/training.py", 4532): "args.eval_interval",
    ("training/training.py", 4553): "args.perform_rl_step",
    ("training/arguments.py", 87): "def parse_and_validate_args",
    ("training/arguments.py", 1232): "args.variable_seq_lengths = False",
    ("training/arguments.py", 1339): "get_device_capability",
    ("training/arguments.py", 1414): "get_device_arch_version() < 10",
    ("training/utils/common_utils.py", 327): "device_memory_used",
    ("training/utils/common_utils.py", 504): "get_device_properties",
    ("training/gpu_sniff_test.py", 59): "torch.cuda.synchronize()",
    ("core/extensions/transformer_engine.py", 70): "import transformer_engine",
    ("core/fp8_utils.py", 42): "if HAVE_TE",
    ("core/fp4_utils.py", 31): "if HAVE_TE",
    ("core/transformer/cuda_graphs.py", 1187): "torch.cuda.CUDAGraph()",
    ("core/optimizer/optimizer_cuda_graph.py", 35): "torch.cuda.CUDAGraph()",
    ("core/utils.py", 1600): "torch.cuda.Event(",
    ("core/energy_monitor.py", 40): "nvmlInit()",
    ("core/distributed/torch_fully_sharded_data_parallel.py", 81): '"cuda"',
    ("core/distributed/fsdp/mcore_fsdp_adapter.py", 156): "torch.cuda.current_device()",
    ("core/optimizer/cpu_offloading/hybrid_optimizer.py", 120): "torch.cuda.current_stream()",
    ("core/transformer/transformer_config.py", 2185): "raise ValueError(",
    ("core/optimizer/distrib_optimizer.py", 838): 's["step"].item()',
    ("core/optimizer/distrib_optimizer.py", 1028): "step = torch.tensor(steps[0], dtype=torc",
    ("core/optimizer/distrib_optimizer.py", 1032): 's["step"] = step',
    ("core/optimizer/distrib_optimizer.py", 1222): "for key in dst_tensors",
    ("core/optimizer/distrib_optimizer.py", 1225): "copy_(tensors[key])",
}


@pytest.mark.parametrize("place", CITED, ids=lambda place: f"{place[0]}:{place[1]}")
def test_comments_cite_the_installed_lines(place: tuple[str, int]) -> None:
    package, _, rest = place[0].partition("/")
    spec = importlib.util.find_spec(f"megatron.{package}")
    assert spec is not None and spec.submodule_search_locations
    path = Path(next(iter(spec.submodule_search_locations))) / rest
    assert CITED[place] in path.read_text().splitlines()[place[1] - 1]


DOCUMENTED = ("docs/megatron.md", "megatron/rl/cpu_training.py")


@pytest.mark.parametrize("file", DOCUMENTED)
def test_these_files_cite_these_lines_only(file: str) -> None:
    text = (Path(__file__).resolve().parents[2] / file).read_text()
    cited = {(name, int(line)) for name, line in re.findall(r"(\w+\.py):(\d+)", text)}
    known = {(file.rpartition("/")[2], line) for file, line in CITED}
    assert cited and cited <= known


def test_the_documentation_lists_what_needs_cuda() -> None:
    from megatron.rl import cpu_training

    text = (Path(__file__).resolve().parents[2] / "docs" / "megatron.md").read_text()
    for name in cpu_training.CUDA_ONLY:
        assert (
            f"`{cpu_training.flag_of(name)}`" in text or f"`{cpu_training.flag_of(name)} " in text
        )

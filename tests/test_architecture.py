"""The plan of the project, kept: floors, one door to torch.distributed, one to the environment, sizes, no rings."""

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "colonnade"
FILES = sorted(SOURCE.rglob("*.py"))
FLOORS = [
    {"errors", ""},
    {"config", "lock", "atomic", "dependent", "upload", "pace", "drawing", "storage", "garbage", "tokenizer_files"},
    {"mesh", "architecture", "randomness", "corpus"},
    {"launch", "data", "kernels", "optim"},
    {"tensor_parallel", "examples"},
    {"model", "data_parallel", "pipeline"},
    {"checkpoint", "evaluation", "generation"},
    {"tasks", "huggingface"},
    {"train", "megatron", "gguf"},
    {"planner"},
    {"verify", "serving", "report"},
    {"demo", "reference", "convert", "lm_eval"},
    {"cli_change", "cli_data", "cli_weights", "cli_ranks", "cli_report", "cli_slurm"},
    {"cli_evaluate", "cli_predict", "cli_plan"},
    {"cli"},
    {"__main__"},
]
CONNECTS = {
    "init_process_group",
    "destroy_process_group",
    "is_available",
    "is_initialized",
    "TCPStore",
    "PrefixStore",
    "DistError",
}
FLOOR = {folder: number for number, floor in enumerate(FLOORS) for folder in floor}


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix("__init__").rstrip(".")


MODULES = {name_of(file) for file in FILES}
TREES = {name_of(file): ast.parse(file.read_text()) for file in FILES}


def imports(tree: ast.AST) -> Iterator[str]:
    """Every dotted name that a file imports, at its top or inside a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(tree: ast.AST) -> Iterator[str]:
    """The modules of this package that a file imports, without the package's name."""
    for name in imports(tree):
        if name == "colonnade" or name.startswith("colonnade."):
            inner = name.removeprefix("colonnade").removeprefix(".")
            yield inner if inner in MODULES else inner.rpartition(".")[0]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_go_down_or_stay_in_the_folder(module: str) -> None:
    folder = module.split(".")[0]
    assert folder in FLOOR, f"{folder} has no floor: give it one in the architecture and here"
    for imported in own_imports(TREES[module]):
        other = imported.split(".")[0]
        assert other == folder or FLOOR[other] < FLOOR[folder], f"{module} imports {imported}"


def test_no_rings() -> None:
    TopologicalSorter({module: set(own_imports(tree)) - {module} for module, tree in TREES.items()}).prepare()


@pytest.mark.parametrize("module", sorted(MODULES))
def test_only_the_mesh_talks_the_launcher_connects_and_alone_the_launcher_reads_the_environment(module: str) -> None:
    talks = {name for name in imports(TREES[module]) if name.startswith("torch.distributed")}
    if module.startswith("checkpoint."):
        talks = {name for name in talks if not name.startswith("torch.distributed.checkpoint")}
    assert module.split(".")[0] in ("mesh", "launch") or not talks, f"{module} imports {talks}"
    code = ast.unparse(TREES[module])
    if not module.startswith(("mesh.", "launch.")):
        assert not re.search(r"\b(dist|torch\.distributed)\.(?!checkpoint\b)\w", code), (
            f"{module} uses torch.distributed"
        )
    if module.startswith("launch."):
        used = set(re.findall(r"\bdist\.(\w+)", code))
        assert used <= CONNECTS, f"{module} uses {used - CONNECTS}: what crosses ranks goes through mesh/"
    if module not in ("launch.launch", "launch.elastic"):
        assert not re.search(r"\bos\.(environb?|getenvb?|putenv)\b|from os import.*\b(environ|getenv)", code), module


@pytest.mark.parametrize("module", sorted(MODULES))
def test_only_the_collectives_branch_on_the_size_of_an_axis(module: str) -> None:
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.If | ast.IfExp | ast.While) and module != "mesh.collectives":
            condition = ast.unparse(node.test)
            of_size = re.search(r"\b(tp|pp|dp|axis)\.size (==|!=|<=?|>=?) \d", condition)
            assert not of_size, f"{module}:{node.lineno} {condition}"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_only_a_family_knows_the_names_of_its_units(module: str) -> None:
    """Others ask what a unit states of itself: whether it reads tokens, which block it is, whether it is the loss."""
    if module.split(".")[0] == "architecture":
        return
    names = r"['\"](embedding|blocks?\.?|head|encoder|decoder)['\"]"
    by_name = {
        ast.Compare: rf"\bunit\.kind\b|{names}",
        ast.Call: rf"\.(startswith|removeprefix)\({names}\)$",
        ast.Subscript: r"\barchitecture\.units\[-?\d+\]$",
    }
    for node in ast.walk(TREES[module]):
        pattern = by_name.get(type(node))
        found = pattern and re.search(pattern, ast.unparse(node))
        assert not found, f"{module}:{node.lineno} {ast.unparse(node)}"


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_sizes_and_state(file: Path) -> None:
    text = file.read_text()
    assert text.count("\n") <= 450, "a second idea is in here: give it its own file"
    for node in ast.walk(ast.parse(text)):
        assert not isinstance(node, ast.Global), f"line {node.lineno}: no global"
        if isinstance(node, ast.FunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= 60, f"{node.name} has {length} lines"


def test_configuration_and_command_line_import_no_torch_at_their_top() -> None:
    for module, tree in TREES.items():
        if module.split(".")[0] in ("config", "cli", "__main__", "errors", ""):
            top = ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
            assert not any(name.split(".")[0] == "torch" for name in imports(top)), module

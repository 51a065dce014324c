"""The plan of the project, kept: floors, one door to torch.distributed, one to the environment, sizes, no rings."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "colonnade"
FILES = sorted(SOURCE.rglob("*.py"))
FLOORS = [
    {"errors", "proc", ""},
    {
        "config",
        "lock",
        "atomic",
        "dependent",
        "upload",
        "pace",
        "mapped",
        "control_groups",
        "drawing",
        "storage",
        "garbage",
        "tokenizer_files",
        "terminal",
        "gpu_kernels",
        "triton_kernels",
    },
    {"mesh", "architecture", "randomness", "corpus", "outputs"},
    {"launch", "data", "kernels"},
    {"tensor_parallel", "examples", "optim"},
    {"model", "data_parallel", "pipeline"},
    {"checkpoint", "evaluation", "generation"},
    {"tasks", "huggingface"},
    {"train", "megatron", "gguf"},
    {"serving"},
    {"planner", "convert", "lm_eval"},
    {"verify", "report"},
    {"demo", "reference", "one_rank"},
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


@cache
def trees() -> dict[str, ast.Module]:
    """By module: parsed where a test asks, not wherever tests are collected."""
    return {name_of(file): ast.parse(file.read_text()) for file in FILES}


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


def test_imports_go_down_or_stay_in_the_folder() -> None:
    homeless = {folder for module in MODULES if (folder := module.split(".")[0]) not in FLOOR}
    assert not homeless, "give it a floor: in the architecture and here"
    upward = []
    for module, tree in trees().items():
        folder = module.split(".")[0]
        for imported in own_imports(tree):
            other = imported.split(".")[0]
            if other != folder and FLOOR[other] >= FLOOR[folder]:
                upward.append(f"{module} imports {imported}")
    assert not upward


def test_the_page_on_the_design_has_every_folder_on_its_floor() -> None:
    page = (SOURCE.parents[1] / "docs" / "design" / "README.md").read_text()
    rows = dict(re.findall(r"^\| (\d+)(?: …)? \| (.*`.*) \|$", page, flags=re.MULTILINE))
    told = {int(number): {*re.findall(r"`(\w+)`", text)} & FLOOR.keys() for number, text in rows.items()}
    last = {folder for floor in FLOORS[max(told) :] for folder in floor if not folder.startswith(("cli_", "__"))}
    assert [told[number] for number in sorted(told)] == [*({*floor} - {""} for floor in FLOORS[: max(told)]), last]


def test_no_rings() -> None:
    TopologicalSorter({module: set(own_imports(tree)) - {module} for module, tree in trees().items()}).prepare()


def test_only_the_mesh_talks_the_launcher_connects_and_alone_the_launcher_reads_the_environment() -> None:
    found = []
    for module, tree in trees().items():
        code = ast.unparse(tree)
        talks = {name for name in imports(tree) if name.startswith("torch.distributed")}
        if module.startswith("checkpoint."):
            talks = {name for name in talks if not name.startswith("torch.distributed.checkpoint")}
        if talks and module.split(".")[0] not in ("mesh", "launch"):
            found.append(f"{module} imports {talks}")
        uses = re.search(r"\b(dist|torch\.distributed)\.(?!checkpoint\b)\w", code)
        if uses and not module.startswith(("mesh.", "launch.")):
            found.append(f"{module} uses torch.distributed")
        other = set(re.findall(r"\bdist\.(\w+)", code)) - CONNECTS
        if other and module.startswith("launch."):
            found.append(f"{module} uses {other}: what crosses ranks goes through mesh/")
        reads = re.search(r"\bos\.(environb?|getenvb?|putenv)\b|from os import.*\b(environ|getenv)", code)
        if reads and module not in ("launch.launch", "launch.elastic", "launch.fork_server"):
            found.append(f"{module} reads the environment")
    assert not found


def test_only_the_collectives_branch_on_the_size_of_an_axis() -> None:
    of_size = re.compile(r"\b(tp|pp|dp|axis)\.size (==|!=|<=?|>=?) \d")
    branches = [
        f"{module}:{node.lineno} {condition}"
        for module, tree in trees().items()
        if module != "mesh.collectives"
        for node in ast.walk(tree)
        if isinstance(node, ast.If | ast.IfExp | ast.While) and of_size.search(condition := ast.unparse(node.test))
    ]
    assert not branches


def test_what_one_rank_has_is_broadcast() -> None:
    """Who gathers all texts to take one sends as many as there are ranks to each of them."""
    taken = [
        f"{module}:{node.lineno} {ast.unparse(node)}"
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).startswith("gather_texts(")
    ]
    assert not taken


def test_only_a_family_knows_the_names_of_its_units() -> None:
    """Others ask what a unit states of itself: whether it reads tokens, which block it is, whether it is the loss."""
    names = r"['\"](embedding|blocks?\.?|head|encoder|decoder)['\"]"
    by_name = {
        ast.Compare: rf"\bunit\.kind\b|{names}",
        ast.Call: rf"\.(startswith|removeprefix)\({names}\)$",
        ast.Subscript: r"\barchitecture\.units\[-?\d+\]$",
    }
    found = [
        f"{module}:{node.lineno} {ast.unparse(node)}"
        for module, tree in trees().items()
        if module.split(".")[0] != "architecture"
        for node in ast.walk(tree)
        if (pattern := by_name.get(type(node))) and re.search(pattern, ast.unparse(node))
    ]
    assert not found


def test_sizes_and_state() -> None:
    found = []
    for file in FILES:
        module = name_of(file)
        if file.read_text().count("\n") > 450:
            found.append(f"{module}: a second idea is in here: give it its own file")
        for node in ast.walk(trees()[module]):
            if isinstance(node, ast.Global):
                found.append(f"{module}:{node.lineno} no global")
            if isinstance(node, ast.FunctionDef) and (length := (node.end_lineno or 0) - node.lineno + 1) > 60:
                found.append(f"{module}: {node.name} has {length} lines")
    assert not found


def test_configuration_and_command_line_import_no_torch_at_their_top() -> None:
    for module, tree in trees().items():
        if module.split(".")[0] in ("config", "cli", "__main__", "errors", ""):
            top = ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
            assert not any(name.split(".")[0] == "torch" for name in imports(top)), module

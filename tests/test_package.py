"""The package as a whole: what importing it costs, which file may import which, public names, file sizes."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import specdec_hf

PACKAGE = Path(specdec_hf.__file__).parent

# A file imports files of a lower rank only; a key may be a folder, a longer key wins. Files of one folder may import
# one another, and rank 0 may use rank 0, as long as nothing goes round in a circle.
RANKS = {
    "_hf": 0,
    "coupling": 0,
    "hardware": 0,
    "heads": 0,
    "output": 0,
    "packing": 0,
    "plots": 0,
    "prompts": 0,
    "proposal": 0,
    "provenance": 0,
    "recurrent": 0,
    "repetition": 0,
    "tree": 0,
    "buffers": 1,
    "costs": 1,
    "default_target": 1,
    "policies": 1,
    "report": 1,
    "stopping": 1,
    "targets": 1,
    "verify": 1,
    "cache": 2,
    "early": 3,
    "forward": 3,
    "loading": 3,
    "options": 3,
    "processors": 3,
    "drafters": 4,
    "pace": 4,
    "decoding": 5,
    "generation": 6,
    "answers": 7,
    "benchmark": 7,
    "demo": 7,
    "interop": 7,
    "training": 7,
    "calibration": 8,
    "comparison": 8,
    "evaluation": 8,
    "cli": 9,
}


def modules() -> list[str]:
    """Dotted names below the package, its own __init__ left out (it loads lazily and may name all)."""
    names = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if parts:
            names.append(".".join(parts))
    return names


def rank(module: str) -> int:
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        if (value := RANKS.get(".".join(parts[:end]))) is not None:
            return value
    raise KeyError(f"{module} has no rank: add it to RANKS in {Path(__file__).name} and to the file list in README.md")


def imported(module: str) -> set[str]:
    """Modules of the package that ``module`` imports, anywhere in the file but under ``if TYPE_CHECKING``."""
    path = PACKAGE.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    known = set(modules())
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            found.update(a.name.removeprefix("specdec_hf.") for a in node.names if a.name.startswith("specdec_hf."))
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            elif (node.module or "").split(".")[0] == "specdec_hf":
                base = (node.module or "").split(".")[1:]
            else:
                base = None
            if base is not None:
                prefix = [part for part in base if part]
                for alias in node.names:
                    deep = ".".join([*prefix, alias.name])
                    found.add(deep if deep in known else ".".join(prefix))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return found & known


def test_import_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, specdec_hf, specdec_hf.cli, specdec_hf.demo, specdec_hf.default_target, specdec_hf.heads\n"
        "dir(specdec_hf)\n"
        "heavy = sorted({'torch', 'transformers', 'numpy', 'huggingface_hub'} & set(sys.modules))\n"
        "assert not heavy, heavy"
    )
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", modules())
def test_imports_point_to_a_lower_rank(module: str) -> None:
    for other in imported(module):
        same_folder = "." in module and "." in other and module.rpartition(".")[0] == other.rpartition(".")[0]
        inside = other == module.rpartition(".")[0] or module == other.rpartition(".")[0]
        both_zero = rank(module) == rank(other) == 0
        assert rank(other) < rank(module) or same_folder or inside or both_zero, (
            f"{module} (rank {rank(module)}) imports {other} (rank {rank(other)})"
        )


def test_no_circle_of_imports() -> None:
    graph = {module: imported(module) - {module} for module in modules()}
    while leaves := [module for module, uses in graph.items() if not uses & set(graph)]:
        for module in leaves:
            del graph[module]
    assert not graph, f"these import one another in a circle: {', '.join(sorted(graph))}"


def test_the_loop_knows_no_concrete_drafter() -> None:
    assert {name for name in imported("decoding") if name.startswith("drafters")} <= {"drafters.base"}


@pytest.mark.parametrize("module", modules())
def test_files_stay_small(module: str) -> None:
    path = PACKAGE.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= 480, f"{path.name} has {lines} lines: split it by what its parts know"


@pytest.mark.parametrize("name", specdec_hf.__all__)
def test_public_names_resolve_and_are_documented(name: str) -> None:
    value = getattr(specdec_hf, name)
    assert name in dir(specdec_hf)
    if name != "__version__":
        assert value.__doc__, f"{name} has no docstring"


def test_names_for_type_checkers_are_the_lazy_ones() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    block = next(n for n in tree.body if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test))
    declared = {a.name: n.module for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert declared == specdec_hf._WHERE


def test_unknown_name_answers_with_the_nearest() -> None:
    with pytest.raises(AttributeError, match=r"did you mean 'enable_speculation'\?.*SpeculativeConfig"):
        specdec_hf.enable_speculaton  # noqa: B018
    with pytest.raises(ImportError):
        from specdec_hf import Zebra  # noqa: F401


def test_typed_marker_and_version() -> None:
    assert (PACKAGE / "py.typed").is_file()
    assert specdec_hf.__version__.count(".") == 2

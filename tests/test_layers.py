"""Modules import only from lower layers (DESIGN.md), as read from the code."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# From the bottom to the top. A module imports from lower lines only, and from its own package.
LAYERS = (
    ("softpick",),
    ("qbench.errors",),
    ("qbench.plugins", "qbench.gpus", "qbench.validation", "qbench.limited_yaml"),
    ("qbench.student_t",),
    ("qbench.files", "qbench.numbers", "qbench.progress", "qbench.machine", "qbench.output", "qbench.attention.kinds"),
    ("qbench.uncertainty", "qbench.tokenizer", "qbench.github"),
    ("qbench.arguments", "qbench.gate.settings"),
    ("qbench.identity",),
    ("qbench.records",),
    ("qbench.attention",),
    ("qbench.quantizers",),
    ("qbench.checkpoint",),
    ("qbench.evaluate", "qbench.analysis"),
    ("qbench.recipe",),
    ("qbench.report", "qbench.gate"),
    ("qbench.runner", "qbench.doctor"),
    ("qbench.commands",),
    ("qbench.cli", "qbench.lm_eval", "qbench"),
)
# Reports and the gate read records, and nothing that computes.
ABOVE_RECORDS = (
    "qbench.attention",
    "qbench.quantizers",
    "qbench.checkpoint",
    "qbench.evaluate",
    "qbench.analysis",
    "qbench.recipe",
)


def layer(module: str) -> tuple[int, str]:
    """The line of a module, and its name there: the longest that matches."""
    named = {name: line for line, names in enumerate(LAYERS) for name in names}
    fitting = [name for name in named if module == name or (name != "qbench" and module.startswith(f"{name}."))]
    assert fitting, f"{module} is in no layer; add it to LAYERS."
    return named[max(fitting, key=len)], max(fitting, key=len)


def modules() -> dict[str, Path]:
    """Every module of ours with its file."""
    found = {}
    for root, package in ((ROOT, "qbench"), (ROOT / "kernels", "softpick")):
        for file in (root / package).rglob("*.py"):
            name = ".".join(file.relative_to(root).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = file
    return found


def imports(source: str, known: dict[str, Path]) -> Iterator[str]:
    """The modules of ours that a source imports, including those in functions, except those only for type checkers."""
    tree = ast.parse(source)
    typing = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    for_types = {id(inner) for node in typing for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else node.module


def looks_up(module: str, imported: str) -> bool:
    """Whether an import looks up, or sideways into another package."""
    (here, own), (there, other) = layer(module), layer(imported)
    if imported == "qbench" or own == other:
        return False  # the package itself has lazy names only
    if own in ("qbench.report", "qbench.gate") and other in ABOVE_RECORDS:
        return True
    return there >= here


def test_imports_only_look_down() -> None:
    known = modules()
    found = [
        f"{module} imports {imported}"
        for module, file in known.items()
        for imported in dict.fromkeys(imports(file.read_text(), known))
        if looks_up(module, imported)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("qbench.records.store", "from qbench.quantizers.options import OPTIONS", True),
        ("qbench.records.store", "def f():\n    from qbench.gate import verdict", True),
        ("qbench.report.delta", "import qbench.quantizers.hqq", True),
        ("qbench.gate.verdict", "from qbench.report.delta import read_report", True),
        ("qbench.gate.verdict", "from qbench.records.store import read_results", False),
        ("qbench.recipe.schema", "from qbench.gate.settings import GateSettings", False),
        ("qbench.gate.settings", "from qbench.gate.verdict import check", True),
    ],
)
def test_an_import_that_looks_up_is_found(module: str, source: str, found: bool) -> None:
    assert any(looks_up(module, imported) for imported in imports(source, modules())) is found


def test_no_package_has_the_name_of_a_public_function() -> None:
    import qbench

    packages = {name.split(".")[1] for name in modules() if name.startswith("qbench.")}
    public = {name for name in dir(qbench) if not name.startswith("_")}
    assert public >= {"quantize", "run", "table", "check"}
    assert packages.isdisjoint({"analyze", *public})


def test_the_lazy_names_lead_somewhere() -> None:
    import qbench

    assert all(getattr(qbench, name).__name__ == name for name in dir(qbench) if not name.startswith("_"))


def test_type_checkers_see_the_names_that_can_be_imported() -> None:
    import qbench

    tree = ast.parse(Path(qbench.__file__).read_text())
    typed = next(node.body for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in typed if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert {name: getattr(qbench, name).__module__ for name in qbench.__all__} == seen


def test_no_import_is_relative() -> None:
    """The test of layers would not see them."""
    relative = [
        module
        for module, file in modules().items()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert relative == []

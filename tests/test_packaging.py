"""What the package imports is what it declares, so that an installation without the developers' tools starts."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "fedet"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def normalised(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(*extras):
    """Distributions that an installation with these extras brings by its own declaration."""
    wanted = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    return {normalised(re.match(r"[\w.-]+", line).group()) for line in wanted}


def is_type_checking(node):
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imported(tree, *, everywhere):
    """Top-level names that a module imports: when it is loaded, or anywhere in its functions too."""
    found, pending = set(), list(tree.body)
    while pending:
        node = pending.pop()
        if is_type_checking(node) or (isinstance(node, ast.FunctionDef) and not everywhere):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            found |= {arg.value.partition(".")[0] for arg in node.args if isinstance(arg, ast.Constant)}
        pending += ast.iter_child_nodes(node)
    return found - set(sys.stdlib_module_names) - {"fedet"}


def undeclared(names, allowed):
    distributions = packages_distributions()
    return {name for name in names if not {normalised(d) for d in distributions.get(name, [name])} & allowed}


MODULES = sorted(path for path in SOURCE.rglob("*.py") if "template" not in path.parts)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_import_is_declared(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    extras = ["flower"] if SOURCE / "flower" in path.parents else []
    assert not undeclared(imported(tree, everywhere=False), declared(*extras))
    if not extras:  # what only a function imports may come with an extra, but never with Flower's
        extras = ["data", "text", "notebook"]
    assert not undeclared(imported(tree, everywhere=True), declared(*extras))


def test_an_undeclared_import_is_found():
    tree = ast.parse("import click\nfrom typing import Any\nif TYPE_CHECKING:\n    import mypy\ndef f():\n    import httpx.x\n")
    assert undeclared(imported(tree, everywhere=False), declared()) == {"click"}
    assert undeclared(imported(tree, everywhere=True), declared()) == {"click", "httpx"}
    assert undeclared(imported(tree, everywhere=True), declared("flower")) == {"click"}


def test_the_command_line_imports_before_it_knows_what_is_installed():
    """Flower's commands are listed without Flower: that module needs nothing but the core's dependencies."""
    tree = ast.parse((SOURCE / "cli" / "flower_commands.py").read_text(encoding="utf-8"))
    assert not undeclared(imported(tree, everywhere=False), declared())

"""What the package imports is what it declares, so that an installation without the developers' tools starts."""

import ast
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml

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


distributions_of = functools.cache(packages_distributions)  # it reads the metadata of every installed package


def undeclared(names, allowed):
    distributions = distributions_of()
    return {name for name in names if not {normalised(d) for d in distributions.get(name, [name])} & allowed}


MODULES = sorted(path for path in SOURCE.rglob("*.py") if "template" not in path.parts)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_import_is_declared(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    extras = [extra for extra in ("flower", "ui") if SOURCE / extra in path.parents]
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


def test_the_citation_has_the_version_and_the_licence_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])


def test_every_tool_is_pinned():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {normalised(line.partition("==")[0]) for line in lines if "==" in line}
    assert declared(*PROJECT["optional-dependencies"].keys() - {"notebook"}) - {"fedet"} <= pinned


def test_the_workflow_runs_what_everybody_runs_and_nothing_else():
    (job,) = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert {name.partition("-")[0] for name in job["strategy"]["matrix"]["os"]} == {"ubuntu", "macos", "windows"}
    least = PROJECT["requires-python"].removeprefix(">=")
    assert job["strategy"]["matrix"]["python"][0] == least


def test_the_hooks_before_a_commit_are_a_part_of_make_check():
    targets = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\ncheck:")[2]
    checks = re.findall(r"^\t\$\(BIN\)/(\S+)", targets.partition("\n\n")[0], flags=re.M)
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert {Path(hook["entry"].split()[0]).name for hook in local["hooks"]} <= set(checks)


def test_make_help_lists_every_target():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = re.search(r"^\.PHONY: (.*)$", text, flags=re.M)[1].split()
    assert sorted(phony) == sorted(re.findall(r"^([a-z-]+):.*## ", text, flags=re.M))


def built(out, source):
    env = os.environ | {"SOURCE_DATE_EPOCH": "1700000000"}
    subprocess.run([sys.executable, ROOT / ".ci" / "dist.py", out, source], env=env, check=True, capture_output=True)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in out.iterdir()}


@pytest.mark.slow
def test_two_builds_of_the_distributions_are_byte_identical(tmp_path):
    ignored = shutil.ignore_patterns(".venv", ".git", "build", "dist", "runs", "results", "__pycache__", "*.egg-info")
    first = built(tmp_path / "one", ROOT)
    elsewhere = shutil.copytree(ROOT, tmp_path / "elsewhere", ignore=ignored)
    for path in elsewhere.rglob("*"):
        os.utime(path, (1_600_000_000, 1_600_000_000))
    assert built(tmp_path / "two", elsewhere) == first
    assert {name.rpartition(".")[2] for name in first} == {"gz", "whl"}
    (elsewhere / "src" / "fedet" / "core.py").write_text("# changed\n", encoding="utf-8")
    changed = built(tmp_path / "three", elsewhere)
    assert all(changed[name] != digest for name, digest in first.items())

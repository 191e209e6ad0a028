"""What the documentation shows works, and names what there is."""

import configparser
import dataclasses
import importlib
import re
import textwrap
from pathlib import Path

import pytest
import torch

from fedet import check, config, core, experiment, models
from fedet.methods import METHODS, REFERENCES
from fedet.storage import metrics
from fedet.train import Training

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "fedet"
CONTRACT = ROOT / ".importlinter"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page, language):
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.S)


def promises_kept(path, name):
    for outcome in check.check(f"{path}:{name}"):
        assert outcome.ok, f"{outcome.name}: {outcome.detail}"


def test_the_toy_method_of_the_interface_runs(tmp_path):
    lines = [line[4:] for line in core.__doc__.splitlines() if line.startswith((">>> ", "... ", "..."))]
    imports = textwrap.dedent("""
        from dataclasses import dataclass
        from typing import ClassVar
        from fedet import maths, train
        from fedet.core import Method, Payload, Weights, weights_of
        from fedet.train import Training
    """)
    path = tmp_path / "toy.py"
    path.write_text(imports + "\n".join(lines) + "\n", encoding="utf-8")
    promises_kept(path, "Toy")


def test_the_example_of_an_own_method_runs_and_is_short(tmp_path):
    (code,) = blocks("docs/guide/own-method.md", "python")
    assert len([line for line in code.splitlines() if line.strip() and not line.startswith("#")]) <= 40
    (tmp_path / "mymethod.py").write_text(code, encoding="utf-8")
    promises_kept(tmp_path / "mymethod.py", "ClientMomentum")


def test_the_example_of_an_own_model_builds(tmp_path, monkeypatch):
    code = next(block for block in blocks("docs/guide/models.md", "python") if "def tiny" in block)
    (tmp_path / "mine.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert models.build("mine.py:tiny", input_shape=(1, 8, 8), options={"hidden": 32}).num_params() > 0


def test_every_key_of_the_configuration_is_documented():
    page = (ROOT / "docs/guide/configuration.md").read_text(encoding="utf-8")
    tables = (
        config.DataConfig,
        config.AugmentConfig,
        config.TextConfig,
        config.ModelsConfig,
        config.ModelSpec,
        config.RunConfig,
        config.PrivacyConfig,
        config.FlowerConfig,
    )
    for table in tables:
        for key in table.model_fields:
            assert f"`{key}`" in page, f"{table.__name__}.{key}"
    for field in dataclasses.fields(Training):
        assert f"`{field.name}`" in page, field.name


@pytest.mark.parametrize("method", METHODS, ids=lambda cls: cls.name)
def test_every_method_has_a_page_with_its_hyper_parameters(method):
    page = (ROOT / "docs" / "methods" / f"{method.name}.md").read_text(encoding="utf-8")
    for field in dataclasses.fields(method):
        assert f"`{field.name}" in page, field.name
    assert method.name in (ROOT / "README.md").read_text(encoding="utf-8").lower()


def test_the_page_of_references_has_all_of_them_with_their_hyper_parameters():
    page = (ROOT / "docs" / "methods" / "references.md").read_text(encoding="utf-8")
    for reference in REFERENCES:
        assert f"| `{reference.name}` |" in page
        assert all(f"| `{field.name}` (" in page for field in dataclasses.fields(reference))


@pytest.mark.parametrize("method", METHODS, ids=lambda cls: cls.name)
def test_the_commands_of_a_method_page_have_the_seeds_of_its_table(method):
    page = (ROOT / "docs" / "methods" / f"{method.name}.md").read_text(encoding="utf-8")
    if "<!-- results: " in page:  # generated from the records, which `fedet study docs --check` compares
        return
    measured = dict(re.findall(r"^\| `([\w-]+)` \| \d+ \| ([\d, ]+) \|", page, flags=re.M))
    commands = dict(re.findall(r"^    fedet compare ([\w-]+) .*--seeds (\S+)", page, flags=re.M))
    assert {preset: seeds.replace(" ", "") for preset, seeds in measured.items()} == commands != {}


def test_the_guide_says_what_the_ledger_counts_as_model_parameters():
    page = (ROOT / "docs/guide/own-method.md").read_text(encoding="utf-8")
    (group,) = re.findall(r"Only the group called `(\w+)` counts as model parameters", page)
    counted = metrics.count(core.Payload({group: {"w": torch.zeros(3)}, "control": {"w": torch.zeros(5)}}))
    assert (counted["model"], counted["other"]) == (3, 5)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_inside_the_repository_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def mapped():
    """Paths in the first column of CONTRIBUTING's map."""
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Map")[1].split("\n## ")[0]
    return re.findall(r"^\| \**`([^`]+)`", section, flags=re.M)


def test_every_path_on_the_map_exists_and_is_listed_once():
    paths = mapped()
    assert len(paths) == len(set(paths))
    for path in paths:
        found = PACKAGE / path
        assert found.is_dir() if path.endswith("/") else found.is_file(), path


def test_every_module_is_on_the_map():
    paths = set(mapped())
    for module in sorted(PACKAGE.rglob("*.py")):
        place = module.relative_to(PACKAGE)
        if place.parts[:2] == ("flower", "template"):  # files that users edit
            continue
        package = place.name == "__init__.py" and place.parent.parts
        assert (f"{place.parent.as_posix()}/" if package else place.as_posix()) in paths, place


def test_every_name_in_the_walk_through_a_round_exists():
    walk = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Follow one round")[1].split("\n## ")[0]
    names = re.findall(r"`((?:\w+\.)+\w+)`", walk.replace("metrics.jsonl", "").replace("ledger.jsonl", ""))
    assert len(names) > 10
    for name in names:
        owner, last = name.rsplit(".", 1)
        if last == "py":
            assert (PACKAGE / name).is_file(), name
        elif owner[0].isupper():
            assert hasattr(getattr(core, owner, None) or getattr(experiment, owner), last), name
        else:
            place = {"fedet": "fedet"}.get(owner, f"fedet.engine.{owner.removeprefix('engine.')}")
            assert hasattr(importlib.import_module(place), last), name


@pytest.mark.skipif(not CONTRACT.exists(), reason="there is no import contract yet")
def test_the_import_graph_is_the_one_that_is_enforced():
    (picture,) = [block for block in blocks("CONTRIBUTING.md", "") if "experiment" in block]
    drawn = [re.split(r"\s{2,}", line)[0].split(" | ") for line in picture.strip().splitlines()]
    contract = configparser.ConfigParser()
    contract.read(CONTRACT, encoding="utf-8")
    layers = contract["importlinter:contract:layers"]["layers"].strip().splitlines()
    assert drawn == [[name.strip().removeprefix("fedet.") for name in layer.split("|")] for layer in layers]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_prose_is_wrapped(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    for line in text.splitlines():
        if not line.startswith(("|", "    ", "![", "#")) and " " in line.strip():
            assert len(line) <= 110, line


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_commands_in_the_documentation_exist():
    import typer.main

    from fedet.cli import app

    group = typer.main.get_command(app)
    for page in PAGES:
        for line in re.findall(r"^fedet ([a-z]+)(?: ([a-z]+))?", page.read_text(encoding="utf-8"), flags=re.M):
            assert line[0] in group.commands, f"{page.name}: fedet {line[0]}"
            sub = group.commands[line[0]]
            if hasattr(sub, "commands") and line[0] != "study":  # its first word may be a plan
                assert line[1] in sub.commands, f"{page.name}: fedet {' '.join(line)}"


def test_the_readme_activates_the_environment_before_its_first_command():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = [line for block in re.findall(r"```\n(.*?)```", text, flags=re.DOTALL) for line in block.splitlines()]
    first = next(number for number, line in enumerate(commands) if line.startswith("fedet "))
    assert any(line.startswith(". .venv/bin/activate") for line in commands[:first])


def test_flwr_run_which_exits_with_0_on_failure_is_never_recommended():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "src/fedet/flower/template/README.md"]
    for page in pages:
        for paragraph in page.read_text(encoding="utf-8").split("\n\n"):
            if "flwr run" in paragraph:
                assert "exits with 0" in paragraph, f"{page} recommends `flwr run`"

"""What the documentation shows works, and names what there is."""

import configparser
import dataclasses
import importlib.util
import itertools
import re
import shlex
import textwrap
import tomllib
from types import SimpleNamespace

import pytest
import torch
import yaml
from pages import PAGES, ROOT, blocks, shell_lines

from fedet import check, config, core, experiment
from fedet.errors import ConfigError
from fedet.methods import METHODS, REFERENCES
from fedet.storage import metrics
from fedet.train import Training

PACKAGE = ROOT / "src" / "fedet"
CONTRACT = ROOT / ".importlinter"
PRESETS = {path.stem for path in (PACKAGE / "config" / "presets").glob("*.toml")}


def blocks_in(page, language):
    return [content for found, content in blocks((ROOT / page).read_text(encoding="utf-8")) if found == language]


@pytest.mark.slow
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
    for outcome in check.check(f"{path}:Toy"):
        assert outcome.ok, f"{outcome.name}: {outcome.detail}"


def test_the_example_of_an_own_method_is_short():
    (code,) = blocks_in("docs/guide/own-method.md", "python")
    assert len([line for line in code.splitlines() if line.strip() and not line.startswith("#")]) <= 40


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


def test_the_root_of_the_package_has_at_most_ten_modules():
    assert len(list((ROOT / "src" / "fedet").glob("*.py"))) <= 10


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
    (picture,) = [block for block in blocks_in("CONTRIBUTING.md", "") if "experiment" in block]
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


def test_badges_say_what_the_project_says_of_itself():
    spec = importlib.util.spec_from_file_location("badges", ROOT / "docs" / "site" / "badges.py")
    badges = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(badges)
    drawn = {name: badges.draw(name, value) for name, value in badges.facts().items()}
    assert {path.stem: path.read_text(encoding="utf-8") for path in badges.FOLDER.iterdir()} == drawn, badges.__doc__
    shown = re.findall(r"!\[(\w+)\]\(docs/img/badges/(\w+)\.svg\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert [(name, name) for name in drawn] == shown


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def fedet_commands(text):
    """Each `fedet ...` of a page as a list of words, those in running text included."""
    inline = re.findall(r"`(fedet\s[^`]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M))
    typed = [line for language, content in blocks(text) if not language for line in shell_lines(content)]
    for line in [*typed, *(" ".join(code.split()) for code in inline)]:
        if line.startswith("fedet ") and not re.search(r"\s\||\.\.\.|: ", line):  # not `fedet a | b`, and not a message
            yield shlex.split(line, comments=True)[1:]


def parsed(words):
    """The command and its values as the command line would see them; raises what it would say otherwise."""
    import typer.main

    from fedet.cli import app

    command = typer.main.get_command(app)
    context = None
    while hasattr(command, "commands"):
        context = command.make_context(command.name, list(words), parent=context)
        name, command, words = command.resolve_command(context, [*context._protected_args, *context.args])
        command.name = name
    return name, command.make_context(name, list(words), parent=context).params


def complete(words):
    """Whether a command is meant to be typed as it is: `fedet run` in a sentence names the command."""
    group = {"data": 2, "config": 2, "flower": 2, "study": 2}
    return len(words) > group.get(words[0], 1)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_in_the_documentation_parse(page):
    for words in fedet_commands(page.read_text(encoding="utf-8")):
        if complete(words):
            name, values = parsed(words)
            if name in ("run", "compare", "sweep"):
                settings_exist(values)


def settings_exist(values):
    """Load the configuration of a command on a preset, with what it sets; names in capitals stand for something else."""
    sources = values.get("configs") or [values.get("config") or "digits"]
    settings = [text for text in values.get("settings") or [] if not re.search(r"=.*\b[A-Z]+\b|mine\.py", text)]
    methods = [values.get("method")] if "methods" not in values else (values["methods"] or "").replace("all", "").split(",")
    for source, method in itertools.product(sources, methods):
        if source in PRESETS and ".py:" not in (method or ""):
            config.load(source, config.assignments(settings) | ({"method.name": method} if method else {}))


def test_a_command_that_does_not_exist_is_found():
    for words in (
        ["nope", "x"],
        ["run", "digits", "--sett", "a=1"],
        ["data", "fetchh", "cifar10"],
        ["run", "--rounds", "many"],
    ):
        with pytest.raises(Exception, match=r"No such|Invalid value|is not a valid"):
            parsed(words)
    with pytest.raises(ConfigError, match="alpha"):
        settings_exist({"config": "digits", "settings": ["data.alfa=0.1"]})
    assert list(fedet_commands("```\nfedet run x \\\n  --seed 1  # why\n```\nsee `fedet\ncheck m.py:M`\n")) == [
        ["run", "x", "--seed", "1"],
        ["check", "m.py:M"],
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_code_in_the_documentation_is_valid(page):
    name = page.relative_to(ROOT)
    for number, code in enumerate(blocks_in(name, "python"), start=1):
        compile(code, f"{name}, block {number}", "exec")
    for code in blocks_in(name, "toml"):
        tomllib.loads(code)


@pytest.fixture(scope="module")
def site():
    """The hooks of the documentation site."""
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "site" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_are_led_everywhere_but_in_code(site):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="methods/fedet.md"))
    text = "See [`maths.py`](../../src/fedet/maths.py) and `x`.\n\n```\n[a](../../LICENSE)\n```\n"
    led = "See [`maths.py`](../api/fedet.maths.md) and `x`.\n\n```\n[a](../../LICENSE)\n```\n"
    assert site.on_page_markdown(text, page, None, None) == led


def test_a_broken_link_ends_the_build_of_the_site():
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert settings["strict"]
    assert settings["validation"]["links"]["not_found"] == settings["validation"]["links"]["anchors"] == "warn"
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.findall(r"mkdocs build(.*)", makefile) == ["", ""]  # with --quiet, strict mode sees no warnings


def test_links_that_leave_the_documentation_lead_to_their_page_on_the_site(site):
    def led(link, folder, uri):
        return site.LINK.sub(lambda found: site._link(found, ROOT / folder, uri), link)

    assert led("[m](../../src/fedet/maths.py)", "docs/methods", "methods/fedet.md") == "[m](../api/fedet.maths.md)"
    assert led("[adr](docs/adr)", ".", "project/CONTRIBUTING.md") == "[adr](../adr/README.md)"
    assert led("[c](../CONTRIBUTING.md#map)", "docs", "README.md") == "[c](project/CONTRIBUTING.md#map)"
    assert led("[x](../LICENSE)", "docs", "README.md") == "x"
    assert led("[broken](nowhere.md)", "docs", "README.md") == "[broken](nowhere.md)"
    assert led("[f](https://flower.ai)", "docs", "README.md") == "[f](https://flower.ai)"


def test_the_site_shows_the_help_of_every_command_and_no_page_is_forgotten(site):
    from mkdocs.config.defaults import MkDocsConfig

    pages = dict(site._commands())
    assert "--equal-traffic" in pages["fedet-compare"]
    assert "Usage: fedet data fetch" in pages["fedet-data"]
    listed = str(site.on_config(MkDocsConfig()).nav)
    for page in (ROOT / "docs").rglob("*.md"):
        assert f"'{page.relative_to(ROOT / 'docs').as_posix()}'" in listed, page


def test_pages_that_load_something_from_elsewhere_are_refused(site, tmp_path):
    from mkdocs.config.defaults import MkDocsConfig

    settings = MkDocsConfig()
    settings.site_dir = str(tmp_path)
    (tmp_path / "good.html").write_text('<a href="https://flower.ai">x</a> <script src="a.js"></script>', encoding="utf-8")
    site.on_post_build(settings)
    (tmp_path / "bad.html").write_text('<script defer src="//cdn.example.org/a.js"></script>', encoding="utf-8")
    with pytest.raises(Exception, match=r"bad\.html.*cdn\.example\.org"):
        site.on_post_build(settings)


def test_the_readme_activates_the_environment_before_its_first_command():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = [line for block in re.findall(r"```\n(.*?)```", text, flags=re.DOTALL) for line in block.splitlines()]
    first = next(number for number, line in enumerate(commands) if line.startswith("fedet "))
    assert any(line.startswith(". .venv/bin/activate") for line in commands[:first])


def test_torch_for_the_cpu_is_the_one_that_make_then_keeps():
    pinned = re.search(r"^(torch==\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), flags=re.M)[1]
    for page in ("README.md", "docs/faq.md"):
        assert re.findall(r"\.venv/bin/pip install (torch\S*)", (ROOT / page).read_text(encoding="utf-8")) == [pinned]
    assert "venv .venv\n" in (ROOT / "Makefile").read_text(encoding="utf-8")  # without --clear


def test_flwr_run_which_exits_with_0_on_failure_is_never_recommended():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "src/fedet/flower/template/README.md"]
    for page in pages:
        for paragraph in page.read_text(encoding="utf-8").split("\n\n"):
            if "flwr run" in paragraph:
                assert "exits with 0" in paragraph, f"{page} recommends `flwr run`"

"""Mutated configurations end in a configuration or in a sentence: no traceback, no hang, no unbounded memory.

A case that fails is named by its number; `mutant(number)` makes it again. `pytest -m slow` runs 10,000 of them.
"""

import functools
import json
import random
import tomllib

import mutations
import pytest

from fedet import config, experiment
from fedet.config.sources import MAX_BYTES, _preset_folder, presets
from fedet.errors import ConfigError, FedetError
from fedet.flower import bundle
from fedet.models import pretrained

TEXTS = [(_preset_folder() / f"{name}.toml").read_bytes() for name in presets()]


def mutant(number):
    """The text of this case: a preset with some entries or bytes changed."""
    rng = random.Random(f"configuration {number}")
    if rng.random() < 0.4:
        text = rng.choice(TEXTS)
        for _ in range(rng.choice((1, 1, 3))):
            text = mutations.change_bytes(text, rng)
        return text
    table = tomllib.loads(rng.choice(TEXTS).decode())
    for _ in range(rng.choice((1, 1, 2, 5))):
        mutations.change_table(table, rng)
    if rng.random() < 0.02:
        table["data"] = mutations.nested(1, rng.choice((10, 40, 300)), rng)
    return mutations.toml(table)


@pytest.mark.parametrize(
    "cases", [range(400), pytest.param(range(400, 10_000), marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_mutated_configurations_end_in_a_sentence(tmp_path, cases):
    config.load("digits")  # what is imported on first use is not the case's time
    path = tmp_path / "mutant.toml"
    refused = 0
    for number in cases:
        path.write_bytes(mutant(number))
        found = mutations.attempt(config.load, path)
        assert isinstance(found, config.Config | ConfigError), f"case {number}: {found!r}"
        refused += isinstance(found, FedetError)
        if isinstance(found, config.Config):  # what was accepted can be written and read back
            path.write_text(found.to_toml(), encoding="utf-8")
            assert config.load(path).digest() == found.digest(), f"case {number}"
    assert len(cases) / 2 < refused < len(cases)


@functools.cache
def _digits():
    return config.load("digits").to_toml()


def value_mutant(number):
    """The resolved preset `digits` with one value replaced, as the table and the name of the key."""
    rng = random.Random(f"value {number}")
    table = tomllib.loads(_digits())
    *way, last = rng.choice([path for path in mutations.places(table) if len(path) > 1 and path[0] != "flower"])
    parent = table
    for key in way:
        parent = parent[key]
    parent[last] = mutations.junk(rng)
    return table


@pytest.mark.parametrize(
    "cases", [range(40), pytest.param(range(40, 3000), marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_what_is_accepted_can_be_built_or_is_told(tmp_path, cases):
    experiment.build(config.load("digits"), tmp_path / "cache")
    path = tmp_path / "mutant.toml"
    built = 0
    for number in cases:
        path.write_bytes(mutations.toml(value_mutant(number)))
        found = mutations.attempt(config.load, path)
        if isinstance(found, config.Config):
            built += not isinstance(mutations.attempt(experiment.build, found, tmp_path / "cache"), FedetError)
    assert built


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = " + "[" * 100_000, "nested"),
        ("x = " + "[" * 300 + "]" * 300, "nested"),
        ("data." + "a." * 500 + "b = 1", "nested"),
        ("a." * 200_000 + "b = 1", "nested"),
        ("base = 'digits'\n[ " + "'a' . " * 100_000 + "b ]", "nested"),
        ("x = { y = 'z', " + '"\\"".' * 100_000 + "b = 1 }", "nested"),
        ("[run]\nrounds = " + "9" * 5000, "not valid TOML"),
        ("[data]\nclients = 1000000000000", "data.clients"),
        ("base = '" + "x" * 5000 + "'", "neither a file nor a preset"),
        ('base = "a\\u0000b"', "neither a file nor a preset"),
        ("base = 'mutant.toml'", "circular"),
        ("#" * (MAX_BYTES + 1), "larger than 1 MB"),
        ("base = 'digits'\n[data.options]\na = nan", "finite"),
        ("base = 'digits'\n[models.server]\nname = 'cnn'\noptions = { a = [1.0, inf] }", "finite"),
    ],
)
def test_files_that_gave_a_traceback_once(tmp_path, text, words):
    path = tmp_path / "mutant.toml"
    path.write_text(text, encoding="utf-8")
    found = mutations.attempt(config.load, path)
    assert isinstance(found, ConfigError)
    assert words in str(found)
    assert len(str(found)) < 1000


def test_dots_in_texts_and_numbers_are_no_levels(tmp_path):
    path = tmp_path / "dots.toml"
    dots = f"# {'.' * 500}\nbase = 'digits'\n[data.options]\na = '{'a. ' * 150}'\nb = [{'0.5, ' * 500}]\nc = '{'.' * 500}'\n"
    path.write_text(dots, encoding="utf-8")
    assert len(config.load(path).data.options["b"]) == 500


def test_a_value_that_is_no_toml_is_a_word(tmp_path):
    for value in ("[" * 100_000, "9" * 5000):
        assert config.assignments([f"data.name={value}"]) == {"data.name": value}


@pytest.mark.parametrize(
    "settings",
    [
        {"set": "[1]"}, {"set": "3"}, {"set": "[" * 100_000},
        {"set": json.dumps({"data": mutations.nested(1, 60, random.Random(0))})},
        {"set": '{"run": [], "data": 1}'}, {"set": "x" * (MAX_BYTES + 1)}, {"config": "/etc/passwd"},
        {"config": "../outside.toml"},
        {"config": "link.toml"}, {"config": "a\0b"}, {"config": "x" * 5000}, {"config": ""},
        {"config": "."}, {"config": "nowhere"},
    ],
)  # fmt: skip
def test_the_settings_of_a_flower_run_stay_in_the_app_folder(tmp_path, settings):
    app = bundle.new(tmp_path / "app")
    outside = tmp_path / "outside.toml"
    outside.write_text("base = 'digits'\n", encoding="utf-8")
    (app / "link.toml").symlink_to(outside)
    assert bundle.load(app, bundle.settings(app)).name == "fedet"
    assert bundle.load(app, {"config": "digits"}).name == "digits"
    found = mutations.attempt(bundle.load, app, bundle.settings(app) | settings)
    assert isinstance(found, ConfigError)


@pytest.mark.parametrize(
    "cases", [range(60), pytest.param(range(60, 1500), marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_mutated_app_folders_end_in_a_sentence(tmp_path, cases):
    app = bundle.new(tmp_path / "app")
    good = {name: (app / name).read_bytes() for name in ("pyproject.toml", "fedet.toml")}
    bundle.load(app, bundle.settings(app))
    for number in cases:
        rng = random.Random(f"app {number}")
        for name, content in good.items():
            (app / name).write_bytes(content)
        name = rng.choice(list(good))
        (app / name).write_bytes(mutations.change_bytes(good[name], rng))
        settings = mutations.attempt(bundle.settings, app)
        if not isinstance(settings, FedetError):
            mutations.attempt(bundle.load, app, settings | {"set": json.dumps(mutations.junk(rng))})


def test_a_submitted_encoder_links_to_no_files_outside_the_app_folder(tmp_path):
    app, private = bundle.new(tmp_path / "app"), tmp_path / "private"
    for folder in (private, app / "encoder"):
        folder.mkdir()
    (private / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    (app / "encoder" / "config.json").symlink_to(private / "config.json")
    with bundle.server_code(app), pytest.raises(ConfigError, match="is not in the app folder"):
        pretrained.find(str(app / "encoder"), "it")
    assert pretrained.find(str(app / "encoder"), "it") == app / "encoder"


@pytest.mark.parametrize(
    "change",
    [
        {"data.name": "text:PRIVATE.csv"},
        {"data.public": "folder:PRIVATE"},
        {"data.name": "text:APP/t.csv", "data.text.vocab": "PRIVATE.csv"},
        {"data.name": "text:APP/leaf"},
        {"data.public": "folder:APP/images"},
    ],
)
def test_a_submitted_configuration_reads_no_files_outside_the_app_folder(tmp_path, change):
    app, private = bundle.new(tmp_path / "app"), tmp_path / "private"
    private.mkdir()
    for path in (tmp_path / "private.csv", app / "t.csv"):
        path.write_text("text,label\na,0\nb,1\n", encoding="utf-8")
    (private / "one.json").write_text('{"user_data": {"a": {"x": ["a", "b"], "y": [0, 1]}}}', encoding="utf-8")
    (private / "one.png").touch()
    for folder, name in (("leaf", "one.json"), ("images", "one.png")):  # the folder is inside, what it links to is not
        (app / folder).mkdir()
        (app / folder / name).symlink_to(private / name)
    changes = {key: value.replace("PRIVATE", str(private)).replace("APP", str(app)) for key, value in change.items()}
    settings = bundle.settings(app) | {"set": json.dumps(changes)}
    with bundle.server_code(app):
        found = mutations.attempt(lambda: experiment.build(bundle.load(app, settings), tmp_path / "cache"))
    assert isinstance(found, ConfigError)
    assert "is not in the app folder" in str(found)

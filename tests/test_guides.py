"""What README and guides show is done as a reader would: the blocks of a page in order, in a folder, with few rounds."""

import re
import shlex
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import tomli_w
from pages import PAGES, ROOT, blocks, shell_lines
from pyarrow import parquet

from fedet.config import sources

NOT_HERE = {
    r"make |pip |\.venv/|python3 -m venv|docker": "it installs something",
    r"\. \.venv": "it changes the shell that it is typed into",
    r"openssl|ssh-keygen|flwr |flower-|fedet flower (up|run)": "it is for other machines: tests/test_flower_local.py",
    r"fedet data fetch": "it needs the network: tests/test_fetch.py",
    r"fedet ui": "it serves until Ctrl-C: tests/test_ui.py",
    r"fedet study table2($| --data-dir)": "it takes hours: tests/test_study.py",
    r"fedet sweep .*--trials": "it takes dozens of runs: tests/test_sweep.py",
}
"""What a command begins with that is not done here, and why."""
SECONDS = r"fedet (sweep|audit|compare .*(--methods all|--references|mlflow|text-desk)|run .*(privacy|=60|runs/sweep))"
"""Commands that only the slow tests do."""
SAYS = {"python.md": "callback 1", "trackers.md": "done"}
"""What the last example of a page prints."""
GUIDES = [ROOT / "README.md", ROOT / "docs" / "faq.md", *(page for page in PAGES if page.parent.name in ("guide", "methods"))]


def small_presets(folder):
    """The presets with few steps, and with the digits in the place of other images."""
    for name in sources.presets():
        data = name if name.startswith(("text", "sent140")) else "digits"
        table = few_steps(sources.parse_toml(sources.source_text(data)[0], data))
        table["run"] |= {"rounds": 2, "workers": 0, "threads": 1}
        (folder / f"{name}.toml").write_text(tomli_w.dumps(table), encoding="utf-8")


def few_steps(table):
    least = {"steps": 1, "epochs": 1, "views": 1, "samples": 50}
    return {k: few_steps(v) if isinstance(v, dict) else min(v, least.get(k, v)) for k, v in table.items()}


def reviews():
    """Texts of enough authors, with labels."""
    words = ["a", "frothy", "romp", "through", "two", "gorgeous", "locations", "and", "hours", "that", "feel", "like", "three"]
    rng = np.random.default_rng(0)
    return [(" ".join(rng.choice(words, 6)), int(rng.integers(2)), f"u{k % 20}") for k in range(1000)]


def prepare(text):
    """What the reader has: tables of which a page shows the first lines, and files whose content does not matter."""
    np.save("images.npy", np.random.default_rng(0).integers(0, 256, (600, 8, 8), dtype=np.uint8))
    np.save("labels.npy", np.arange(600) % 10)
    for name in ("my", "a", "b"):
        Path(f"{name}.toml").write_text('base = "digits"\n', encoding="utf-8")
    for block in re.finditer(r"```csv\n(.*?\n)(.*?)```", text, flags=re.S):
        name = re.findall(r"`(\w+\.csv)`", text[: block.start()])[-1]
        more = "".join(f"{text},{label},{author}\n" for text, label, author in reviews())
        Path(name).write_text(block[1] + (block[2] + more if "author" in block[1] else 40 * block[2]), encoding="utf-8")
    Path("DIR/text").mkdir(parents=True)
    columns = dict(zip(("text", "label", "user"), map(list, zip(*reviews(), strict=True)), strict=True))
    parquet.write_table(pyarrow.table(columns), "DIR/text/rt_critics.parquet")


def done_before(text):
    """The text with the newest run in the place of the one that is meant."""
    runs = sorted(Path("runs").glob("*/config.toml"), key=lambda path: path.stat().st_mtime)
    return re.sub(r"\bRUN\b|runs/NAME", str(runs[-1].parent), text) if runs else text


def shortened(command):
    """The words of a command, with fewer rounds and seeds, and in this process."""
    command = re.sub(r"--rounds \d+", "--rounds 1", re.sub(r"--seeds [\d,]+", "--seeds 0", command))
    return shlex.split(command)[1:] + (["--jobs", "1"] if re.match(r"fedet (compare|sweep)", command) else [])


def commands(content):
    """What is to be typed, without comments."""
    return [line.split("  #")[0].strip() for line in shell_lines(content)]


def walk(page, skipped, fedet, tmp_path, monkeypatch):
    """Do what the page shows, block by block; presets are small, and the home folder is an empty one."""
    text = page.read_text(encoding="utf-8")
    presets = tmp_path.parent / f"{tmp_path.name}-presets"
    presets.mkdir()
    small_presets(presets)
    monkeypatch.setattr(sources, "_preset_folder", lambda: presets)
    monkeypatch.setenv("HOME", str(tmp_path))
    prepare(text)
    scope = {"__name__": "guide"}
    for language, content in blocks(text):
        if file := re.match(r"# (\S+\.(?:py|toml))\n", content):
            Path(file[1]).write_text(content, encoding="utf-8")
        elif language == "python":
            code = re.sub(r"rounds=\d+", "rounds=2", done_before(content)).replace('["accuracy"] > 0.5', '["accuracy"] > 0')
            exec(compile(code, page.name, "exec"), scope)
        elif not language:
            for command in commands(content):
                if command.startswith("fedet ") and not re.match("|".join(skipped), command):
                    said = fedet(*shortened(done_before(command)))
                    assert said.code == 0, (command, said)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_what_a_page_shows_works(page, fedet, tmp_path, monkeypatch, capsys):
    walk(page, [*NOT_HERE, SECONDS], fedet, tmp_path, monkeypatch)
    assert SAYS.get(page.name, "") in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "page", [page for page in GUIDES if re.search(SECONDS, page.read_text(encoding="utf-8"))], ids=lambda page: page.stem
)
def test_what_takes_longer_works_too(page, fedet, tmp_path, monkeypatch):
    walk(page, NOT_HERE, fedet, tmp_path, monkeypatch)


def test_no_command_is_left_out_without_a_reason():
    for page in GUIDES:
        for language, content in blocks(page.read_text(encoding="utf-8")):
            for command in commands(content) if language == "" else []:
                assert re.match("|".join(["fedet ", "export ", *NOT_HERE]), command), f"{page.name}: {command}"

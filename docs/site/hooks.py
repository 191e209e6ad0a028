"""What MkDocs needs beyond the Markdown files: navigation, generated pages, and links that leave docs/.

The files under docs/ are written to be read in the repository as well. A new guide, method page or decision appears on the
site without being listed here.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FIRST_GUIDES = ("first-run", "configuration", "data", "models", "own-method")
"""The order of the guides that most readers need; the others follow by name."""
START, RESULTS = ("README.md", "concepts.md", "faq.md"), ("results.md", "performance.md")
"""Pages of docs/ with a place of their own in the navigation."""
PROJECT = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
"""Files at the root of the repository that are pages of the site as well."""
MODULES = ("core", "maths", "train", "errors", "check", "data", "models")
"""Modules for users' own code, besides the methods and whatever a page links to."""
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
FENCED = re.compile(r"(^```.*?^```$)", flags=re.S | re.M)
LOADED_FROM_ELSEWHERE = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=[\"']?(?:https?:)?//[^\"'\s>]+")
WIDTH = 100


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the navigation from the files that there are."""
    guides = _by_preference(_pages("guide"), FIRST_GUIDES)
    decisions = _by_preference(_pages("adr"), ("README",))
    others = sorted({page.name for page in DOCS.glob("*.md")} - {*START, *RESULTS})
    config.nav = [
        {"Start": [START[0], *guides[:1], *START[1:]]},
        {"Guides": guides[1:]},
        {"Methods": _by_preference(_pages("methods"), ("README",))},
        {"Results": list(RESULTS)},
        {"Reference": [{"Commands": [f"commands/{name}.md" for name, _ in _commands()]}, {"Python": _api_pages()}]},
        {"Project": [*(_site_uri(ROOT / name) for name in PROJECT), *others, {"Decisions": decisions}]},
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not files in docs/."""
    for name in PROJECT:
        _add(files, config, _site_uri(ROOT / name), (ROOT / name).read_text(encoding="utf-8"))
    for name, text in _commands():
        _add(files, config, f"commands/{name}.md", text)
    for uri in _api_pages():
        module = Path(uri).stem
        _add(files, config, uri, f"# {module}\n\n::: {module}\n    options:\n      heading_level: 2\n")
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to files outside docs/ to their page on the site, or drop them where there is none."""
    uri = page.file.src_uri
    source = ROOT / Path(uri).name if uri.startswith("project/") else DOCS / uri
    parts = FENCED.split(markdown)
    parts[::2] = [LINK.sub(lambda found: _link(found, source.parent, uri), part) for part in parts[::2]]
    return "".join(parts)


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse pages that load anything from elsewhere: they must work offline, and tell nobody who reads them."""
    for page in sorted(Path(config.site_dir).rglob("*.html")):
        if found := LOADED_FROM_ELSEWHERE.search(page.read_text(encoding="utf-8")):
            raise PluginError(f"{page}: {found[0]} would be loaded from elsewhere")


def _link(found: re.Match[str], folder: Path, uri: str) -> str:
    """A Markdown link as it has to be on the page `uri`."""
    target = found["target"]
    if "://" in target or target.startswith("mailto:"):
        return found[0]
    place = (folder / target).resolve()
    if not place.exists() and place.is_relative_to(DOCS):  # MkDocs says so; outside docs/ tests/test_docs.py does
        return found[0]
    there = _site_uri(place)
    if there is None:
        return found["text"]
    return f"{found['image']}[{found['text']}]({os.path.relpath(there, Path(uri).parent)}{found['anchor'] or ''})"


def _site_uri(place: Path) -> str | None:
    """Where a file of the repository is on the site."""
    if place.is_dir():
        place = place / "README.md"
    if place == ROOT / "README.md":
        return "README.md"
    if place.parent == ROOT and place.name in PROJECT:
        return f"project/{place.name}"
    if place.is_relative_to(DOCS):
        return place.relative_to(DOCS).as_posix()
    if place.is_relative_to(ROOT / "src") and place.suffix == ".py":
        return f"api/{'.'.join(place.relative_to(ROOT / 'src').with_suffix('').parts)}.md"
    return None


def _pages(folder: str) -> list[str]:
    return sorted(page.relative_to(DOCS).as_posix() for page in (DOCS / folder).glob("*.md"))


def _by_preference(pages: list[str], first: tuple[str, ...]) -> list[str]:
    rank = {name: number for number, name in enumerate(first)}
    return sorted(pages, key=lambda page: (rank.get(Path(page).stem, len(first)), page))


def _api_pages() -> list[str]:
    """One page per module: the public ones, the methods, and those that a page links to."""
    source = ROOT / "src" / "fedet"
    modules = {"fedet", *(f"fedet.{name}" for name in MODULES)}
    modules |= {f"fedet.methods.{path.stem}" for path in (source / "methods").glob("[a-z]*.py")}
    uris = {f"api/{module}.md" for module in modules}
    for page in DOCS.rglob("*.md"):
        for found in LINK.finditer(page.read_text(encoding="utf-8")):
            uri = _site_uri((page.parent / found["target"]).resolve())
            uris |= {uri} if uri and uri.startswith("api/") else set()
    return sorted(uris, key=lambda uri: (uri.count("."), uri))


def _commands() -> Iterator[tuple[str, str]]:
    """For each command its name and its page, with `--help` as the terminal shows it, those of its own commands included."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries, which MkDocs would show
        import typer.main

        from fedet.cli import app

    program: Any = typer.main.get_command(app)
    yield "fedet", f"# fedet\n\n{_help(program, 'fedet')}"
    for name, command in program.commands.items():
        text = f"# fedet {name}\n\n{_help(command, f'fedet {name}')}"
        for sub, inner in getattr(command, "commands", {}).items():
            text += f"\n## fedet {name} {sub}\n\n{_help(inner, f'fedet {name} {sub}')}"
        yield f"fedet-{name}", text


def _help(command: Any, path: str) -> str:
    context = command.context_class(command, info_name=path, terminal_width=WIDTH, max_content_width=WIDTH)
    return f"```text\n{command.get_help(context).strip()}\n```\n"


def _add(files: Files, config: MkDocsConfig, uri: str | None, content: str) -> None:
    assert uri is not None
    files.append(File.generated(config, uri, content=content))

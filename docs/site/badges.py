"""The README's badges, drawn from the project's own files: nothing is asked of a server, and a test compares them.

python docs/site/badges.py
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "img" / "badges"
CHARACTER, SPACE = 6.2, 6
"""Pixels: the mean width of a character of this font at 11 pixels, and the room beside a text."""
SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{all}" height="20" role="img" aria-label="{name}: {value}">
<title>{name}: {value}</title>
<clipPath id="c"><rect width="{all}" height="20" rx="3"/></clipPath>
<g clip-path="url(#c)"><rect width="{left}" height="20" fill="#4a5058"/>
<rect x="{left}" width="{right}" height="20" fill="#00629b"/></g>
<g fill="#fff" text-anchor="middle" font-family="Verdana, 'DejaVu Sans', sans-serif" font-size="11">
<text x="{name_at}" y="14" textLength="{name_long}">{name}</text>
<text x="{value_at}" y="14" textLength="{value_long}">{value}</text></g>
</svg>
"""


def facts() -> dict[str, str]:
    """What the badges say."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project, typed = told["project"], "Typing :: Typed" in told["project"]["classifiers"]
    (venue,) = re.findall(r"\((IJCAI \d+)\)", (ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    return {
        "version": project["version"],
        "python": project["requires-python"].replace(">=", "≥ "),
        "licence": project["license"],
        "types": "mypy strict" if typed and told["tool"]["mypy"]["strict"] else "partial",
        "paper": venue,
    }


def draw(name: str, value: str) -> str:
    """A badge as SVG."""
    longs = [round(CHARACTER * len(text)) for text in (name, value)]
    left, right = (long + 2 * SPACE for long in longs)
    return SVG.format(
        name=name, value=value, all=left + right, left=left, right=right,
        name_at=left / 2, value_at=left + right / 2, name_long=longs[0], value_long=longs[1],
    )  # fmt: skip


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, value in facts().items():
        (FOLDER / f"{name}.svg").write_text(draw(name, value), encoding="utf-8")

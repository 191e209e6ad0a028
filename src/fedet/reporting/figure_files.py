"""Figures as files and as elements of a page, where they take the colours of its style sheet."""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Callable
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from fedet.reporting.plots import COLOURS, EDGE, FAINT, GREY, INK, NARROW, STYLE, WIDTH
from fedet.storage.files import replacing

THEME = {INK: "ink", GREY: "soft", FAINT: "line", EDGE: "axis"} | {c.lower(): f"c{i}" for i, c in enumerate(COLOURS, start=1)}
"""The variables of the pages' style sheet that stand for these colours."""
Draw = Callable[[float], Figure]
"""Draws a figure of this width."""


def publish(draw: Draw, folder: Path, name: str) -> str:
    """Write a figure's files into the folder, and return it as elements of a page: a wide and a narrow variant."""
    wide = save(draw(WIDTH), folder, name)
    return inline_svg(wide, "wide") + inline_svg(svg(draw(NARROW)), "narrow")


def save(figure: Figure, folder: str | os.PathLike[str], name: str) -> str:
    """Write `name`.png and `name`.svg into the folder, each atomically, and return the SVG's text."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    png = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        if engine := figure.get_layout_engine():  # once, because each savefig would repeat the layout and an extra drawing
            engine.execute(figure)
            figure.set_layout_engine(None)
        figure.savefig(png, format="png", dpi=150, metadata={"Software": None})
    text = svg(figure)
    for path, content in ((folder / f"{name}.png", png.getvalue()), (folder / f"{name}.svg", text.encode())):
        with replacing(path) as draft:
            draft.write_bytes(content)
    return text


def inline_svg(text: str, kind: str = "wide") -> str:
    """A figure's SVG as an element of a page, with unique ids and the colours of the page's style sheet."""
    text = text[text.index("<svg") :]
    text = re.sub(r'\sxmlns(:xlink)?="[^"]*"', "", text, count=2)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1), count=1)
    own = "f" + hashlib.blake2b(text.encode(), digest_size=4).hexdigest() + "-"
    text = re.sub(r'(\sid="|href="#|url\(#)', rf"\g<1>{own}", text)
    text = text.replace("*{stroke", f"#{own}figure_1 *{{stroke", 1).replace("<svg", f'<svg class="{kind}"', 1)
    text = text.replace('style="fill: #ffffff"', 'style="fill: none"').replace(
        "stroke: #ffffff", "stroke: var(--card, #ffffff)"
    )
    return re.sub(r"(?<=[ :])#[0-9a-f]{6}(?=[;\"])", lambda m: _themed(m.group()), text)


def _themed(colour: str) -> str:
    return f"var(--{THEME[colour]}, {colour})" if colour in THEME else colour


def svg(figure: Figure) -> str:
    """The figure as the text of an SVG file; the same figure always gives the same text."""
    out = io.StringIO()
    with matplotlib.rc_context(STYLE):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(out, format="svg", metadata=nothing, dpi=120)
    return out.getvalue()

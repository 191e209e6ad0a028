"""The documentation's pages, and what is in their blocks of code."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(text):
    """The language and the content of each block of code, in order; the language of an indented one is None."""
    found = re.finditer(r"^```(?P<language>\w*)\n(?P<fenced>.*?)^```$|(?P<indented>(?:^    .*\n)+)", text, flags=re.S | re.M)
    return [(block["language"], block["fenced"] or block["indented"] or "") for block in found]


def shell_lines(content):
    """The lines of a block; continued ones are joined."""
    return [line.strip() for line in content.replace("\\\n", " ").splitlines() if line.strip()]

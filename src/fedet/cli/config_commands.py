"""`fedet config`: show configurations."""

from __future__ import annotations

import shutil
import textwrap

from fedet.cli import output
from fedet.cli.options import Config, Json, Method, Rounds, Seed, Set, changes


def show(config: Config = None, method: Method = None, rounds: Rounds = None, seed: Seed = None, settings: Set = None) -> None:
    """Print the resolved configuration with every default.

    CONFIG is a TOML file or the name of a preset (default: digits).
    """
    from fedet import config as configuration
    from fedet.config.sources import overrides

    asked = overrides(changes(method, rounds, seed, settings, None))
    output.write(configuration.load(config, asked).to_toml().removesuffix("\n"))


def list_(as_json: Json = False) -> None:
    """List the presets and what they are."""
    from fedet.config import sources

    found = sources.preset_descriptions()
    if as_json:
        output.write_json([{"name": name, "description": text} for name, text in found.items()])
    else:
        width = max(map(len, found))
        columns = shutil.get_terminal_size((160, 24)).columns - width - 2
        for name, text in found.items():
            first, *rest = textwrap.wrap(text, max(columns, 30))
            output.write(f"{name:<{width}}  {first}")
            for line in rest:
                output.write(" " * (width + 2) + line)

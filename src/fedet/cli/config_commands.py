"""`fedet config`: show configurations."""

from __future__ import annotations

from fedet.cli import output
from fedet.cli.options import Config, Method, Rounds, Seed, Set, changes


def show(config: Config = None, method: Method = None, rounds: Rounds = None, seed: Seed = None, settings: Set = None) -> None:
    """Print the resolved configuration with every default.

    CONFIG is a TOML file or the name of a preset (default: digits).
    """
    from fedet import config as configuration
    from fedet.config.sources import overrides

    asked = overrides(changes(method, rounds, seed, settings, None))
    output.write(configuration.load(config, asked).to_toml().removesuffix("\n"))


def list_() -> None:
    """List the presets."""
    from fedet.config import sources

    output.write("\n".join(sources.presets()))

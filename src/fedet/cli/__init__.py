"""The command line."""

from fedet.cli.commands import app, main

__all__ = ["app", "main"]

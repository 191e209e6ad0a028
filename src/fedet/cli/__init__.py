"""The command line."""

from fedet.cli.program import app, main

__all__ = ["app", "main"]

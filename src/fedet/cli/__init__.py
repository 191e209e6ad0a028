"""The command line."""

from fedet.cli.app import app, main

__all__ = ["app", "main"]

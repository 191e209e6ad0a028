"""`python -m fedet`."""

from fedet.cli import main

main()

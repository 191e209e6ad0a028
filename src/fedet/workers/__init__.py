"""Processes beside this one: a pool for the work of one run, or several runs side by side."""

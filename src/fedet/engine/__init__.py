"""A run from its configuration to its result: rounds, exchanges with clients, evaluation, comparisons."""

"""Follow a run from Python: progress in terminals and notebooks, and experiment trackers."""

"""What a run leaves on disk: checkpoints, client state, metrics, models."""

"""The training loop, metrics, progress and resuming."""

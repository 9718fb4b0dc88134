"""Hugging Face checkpoints in and out, and orbax checkpoints."""

"""Advantages, objectives, rewards and the sampler."""

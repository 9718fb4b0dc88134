"""Attention of queries over a prefix state and over themselves."""

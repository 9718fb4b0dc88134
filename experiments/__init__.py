"""Programs run from the repository root: `python -m experiments.<name>`."""

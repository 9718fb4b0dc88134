"""Tasks, tokenizers and groups sampled elsewhere."""

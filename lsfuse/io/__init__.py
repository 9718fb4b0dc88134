"""Hugging Face checkpoints and flax nnx models in and out, and orbax checkpoints."""

from lsfuse.io.hf_config import read_config
from lsfuse.io.hf_load import check_hf, load_hf, resolve_hf
from lsfuse.io.hf_save import save_hf
from lsfuse.io.nnx_bridge import from_nnx, to_nnx
from lsfuse.io.tokenizer import Tokenizer, check_vocab

__all__ = [
    "Tokenizer",
    "check_hf",
    "check_vocab",
    "from_nnx",
    "load_hf",
    "read_config",
    "resolve_hf",
    "save_hf",
    "to_nnx",
]

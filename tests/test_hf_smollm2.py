"""A real checkpoint: SmolLM2-135M-Instruct in the folder that LSFUSE_SMOLLM2 names. Needs no torch.

The text for the perplexity is WikiText-2's validation split, at LSFUSE_WIKITEXT2 or beside the repository in
shared/data/wikitext2/valid.txt.
"""

import functools
import os
import pathlib

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsfuse.io import Tokenizer, check_vocab, load_hf, save_hf
from lsfuse.io.hf_safetensors import read_header, read_rows
from lsfuse.model import count_params, forward, logits

CHECKPOINT = os.environ.get("LSFUSE_SMOLLM2")
BESIDE = pathlib.Path(__file__).resolve().parents[2] / "shared" / "data" / "wikitext2" / "valid.txt"
TEXT = pathlib.Path(os.environ.get("LSFUSE_WIKITEXT2", BESIDE))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHECKPOINT, reason="LSFUSE_SMOLLM2 does not name a folder with SmolLM2-135M-Instruct"),
]


def test_export_of_the_import_is_the_original(tmp_path):
    config, params = load_hf(CHECKPOINT)
    assert count_params(config) == 134_515_008 and config.tie_word_embeddings
    tokenizer = Tokenizer.load(CHECKPOINT)
    check_vocab(tokenizer, config)
    save_hf(tmp_path / "m", config, params, tokenizer, max_shard_bytes=100_000_000)
    old = read_header(pathlib.Path(CHECKPOINT) / "model.safetensors")
    new = {name: info for file in (tmp_path / "m").glob("*.safetensors") for name, info in read_header(file).items()}
    assert old.keys() == new.keys()
    for name, info in old.items():
        assert (info.dtype_name, info.shape) == (new[name].dtype_name, new[name].shape)
        assert np.array_equal(*(read_rows(t, 0, t.shape[0]).view(np.uint8) for t in (info, new[name]))), name
    again, copy = load_hf(tmp_path / "m")
    assert again == config
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(copy), strict=True):
        assert a.dtype == b.dtype and np.array_equal(*(np.asarray(x).view(np.uint16) for x in (a, b)))
    assert (tmp_path / "m" / "tokenizer.json").read_bytes() == (
        pathlib.Path(CHECKPOINT) / "tokenizer.json"
    ).read_bytes()


def test_chat():
    tokenizer = Tokenizer.load(CHECKPOINT)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id and tokenizer.eos_token_id in ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.skipif(not TEXT.is_file(), reason="no WikiText-2: set LSFUSE_WIKITEXT2 to its valid.txt")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_perplexity(dtype):
    """15.8 at context 1,024 over the first 4,096 tokens."""
    config, params = load_hf(CHECKPOINT, dtype)
    # The beginning is enough, and much faster to encode than all of it.
    ids = Tokenizer.load(CHECKPOINT).encode(TEXT.read_text(encoding="utf-8")[:40_000])[:4096]
    windows = jnp.asarray(ids, jnp.int32).reshape(4, 1, 1024)

    @functools.partial(jax.jit, compiler_options=helpers.OPTIMIZED)
    def total(params, window):
        scores = logits(params, config, forward(params, config, window))
        logps = jnp.take_along_axis(jax.nn.log_softmax(scores[:, :-1]), window[:, 1:, None], -1)
        return logps.sum()

    loss = -sum(float(total(params, window)) for window in windows) / (4 * 1023)
    assert np.exp(loss) == pytest.approx(15.8, abs=0.1), np.exp(loss)

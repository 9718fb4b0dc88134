"""FFN fusion of SmolLM2-135M-Instruct on WikiText-2's validation text against a prototype in PyTorch.

The first 1,024 tokens of characters 2,000 to 30,000 as two windows of 512; float32 arithmetic on the bfloat16 weights;
perplexity over the 511 predictions of each window, KL to the parent over all 1,024 positions. See test_hf_smollm2.py
for where checkpoint and text are looked for.
"""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_hf_smollm2 import CHECKPOINT, TEXT

from lsfuse import fusion, io
from lsfuse.fusion.evaluate import final_hidden
from lsfuse.fusion.forward import token_measures

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHECKPOINT, reason="LSFUSE_SMOLLM2 does not name a folder with SmolLM2-135M-Instruct"),
    pytest.mark.skipif(not TEXT.is_file(), reason="no WikiText-2: set LSFUSE_WIKITEXT2 to its valid.txt"),
]

# Attentions removed, what then happens to the FFNs, and the prototype's perplexity and KL.
ROWS = {
    "6-9 without attention": (range(6, 10), None, 20.72, 0.191),
    "6-8 fused": (range(6, 10), fusion.fuse_ffn([(6, 8)]), 23.78, 0.318),
    "6-8 reversed": (range(6, 10), fusion.reverse([(6, 8)]), 24.69, 0.341),
    "6-8 removed": (range(6, 10), fusion.remove_ffn([6, 7, 8]), 192.3, 2.283),
    "6-9 fused, the last one too": (range(6, 10), fusion.fuse_ffn([(6, 9)]), 320.0, 2.832),
    "5-7 without attention": (range(5, 8), None, 19.74, 0.126),
    "5-6 fused": (range(5, 8), fusion.fuse_ffn([(5, 6)]), 20.52, 0.159),
    "5-7 fused, the last one too": (range(5, 8), fusion.fuse_ffn([(5, 7)]), 21.45, 0.208),
    "5-6 removed": (range(5, 8), fusion.remove_ffn([5, 6]), 23.63, 0.293),
}


@functools.partial(jax.jit, static_argnums=0)
def hidden(config, params, texts):
    return final_hidden(params, config, *texts)


@functools.partial(jax.jit, static_argnums=0, compiler_options=helpers.OPTIMIZED)
def measures(config, params, child, parent, ids):
    """Per token, from what two models' last blocks put out: head and final norm are the parent's."""
    return token_measures((params, params), (config, config), (child, parent), ids)


@pytest.fixture(scope="module")
def parent():
    return io.load_hf(CHECKPOINT, "float32")


@pytest.fixture(scope="module")
def texts():
    """ids, lengths. The beginning of the characters is enough."""
    found = fusion.windows(TEXT.read_text(encoding="utf-8")[2_000:12_000], io.Tokenizer.load(CHECKPOINT), 512, 2)
    return jnp.asarray(found.ids), jnp.asarray(found.lengths)


@pytest.fixture(scope="module")
def reference(parent, texts):
    return hidden(*parent, texts)


@pytest.mark.parametrize("row", ROWS)
def test_the_prototype_s_table(parent, texts, reference, row):
    """Within 0.5 %, and the three decimals that the prototype's KL has. As `fusion.evaluate`, which would run the
    parent again for every row."""
    removed, then, perplexity, kl = ROWS[row]
    parts = [fusion.remove_attention(removed), *([then] if then else [])]
    config, params = fusion.chain(*parts)(*parent)
    rest = {name: leaf for name, leaf in params.items() if name != "runs"}
    found = measures(parent[0], rest, hidden(config, params, texts), reference, texts[0])
    nll = {name: np.asarray(found[name], np.float64).reshape(2, 512)[:, :-1].mean() for name in ("nll0", "nll1")}
    assert np.exp(nll["nll1"]) == pytest.approx(18.328, rel=5e-3)
    assert np.exp(nll["nll0"]) == pytest.approx(perplexity, rel=5e-3)
    assert abs(float(found["kl"].mean()) - kl) <= 5e-3 * kl + 5e-4

"""The model families, tiny: Llama, and every feature that sets another apart from it."""

import dataclasses

from helpers import TINY

from lsfuse.model.config import BlockConfig, RopeScaling

GEMMA = dict(
    post_norms=True,
    norm_offset=1.0,
    embed_scale=4.0,
    query_pre_attn_scalar=6.0,
    hidden_act="gelu_tanh",
    tie_word_embeddings=True,
)

# All that families add to attention and head at once, for a model with blocks that name the local rope.
EVERYTHING = GEMMA | dict(
    qk_norm=True, attn_logit_softcapping=5.0, final_logit_softcapping=5.0, local_rope_theta=100.0
)

# The families, tiny. Windows are shorter than prompts, responses and chunks; blocks of a family form one run.
FAMILIES = {
    "mistral": dataclasses.replace(TINY, blocks=(BlockConfig("sliding", 2, 24, window=3),) * 2),
    "qwen3": dataclasses.replace(
        TINY,
        qk_norm=True,
        rope_scaling=RopeScaling("yarn", 4.0, original_max_position=16, beta_fast=2.0, beta_slow=0.25),
    ),
    "gemma2": dataclasses.replace(
        TINY,
        blocks=(BlockConfig("sliding", 2, 24, window=4), BlockConfig("full", 2, 24)) * 2,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=2.0,
        **GEMMA,
    ),
    # The prefix needs only keys and values of the last block: here its window, and its rope, are the local ones.
    "gemma3": dataclasses.replace(
        TINY,
        blocks=(
            BlockConfig("sliding", 2, 24, window=5, local_rope=True),
            BlockConfig("full", 2, 24),
            BlockConfig("sliding", 2, 24, window=3, local_rope=True),
        ),
        qk_norm=True,
        rope_theta=500.0,
        rope_scaling=RopeScaling("linear", 2.0),
        local_rope_theta=20.0,
        **GEMMA,
    ),
    "plain": dataclasses.replace(
        TINY,
        blocks=(BlockConfig("full", 2, 20, ffn="plain"), BlockConfig("sliding", 2, 20, ffn="plain", window=6)),
        hidden_act="gelu_tanh",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
    ),
}

# Llama, and families with features that only helpers.MIXED has, too; for the tests that are of every family by name.
LLAMAS = {
    "llama": TINY,
    "llama3": dataclasses.replace(TINY, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 32)),
    "qwen2": dataclasses.replace(
        TINY, qkv_bias=True, blocks=(BlockConfig("full", 2, 24), BlockConfig("sliding", 2, 24, window=4))
    ),
}

"""What leaves are called in nnx code, and how their axes may lie.

Axes: D model, N query heads, K kv heads, H head dim, F ffn, V vocabulary; L blocks, where they are stacked. A layout
lists a leaf's axes in order, merged ones written together: "D NH" is a kernel (in, out), "D N H" the same by heads.
"""

import re

# Axes of every leaf in the parameter tree's order, which stores heads and their dim as one axis.
AXES = {
    "embed_tokens": "V D",
    "norm": "D",
    "lm_head": "D V",
    "input_layernorm": "D",
    "post_attention_layernorm": "D",
    "pre_feedforward_layernorm": "D",
    "post_feedforward_layernorm": "D",
    "q_proj": "D N H",
    "k_proj": "D K H",
    "v_proj": "D K H",
    "o_proj": "N H D",
    "q_proj_bias": "N H",
    "k_proj_bias": "K H",
    "v_proj_bias": "K H",
    "o_proj_bias": "D",
    "q_norm": "H",
    "k_norm": "H",
    "gate_proj": "D F",
    "up_proj": "D F",
    "down_proj": "F D",
    "gate_proj_bias": "F",
    "up_proj_bias": "F",
    "down_proj_bias": "D",
    "fc_in": "D F",
    "fc_out": "F D",
    "fc_in_bias": "F",
    "fc_out_bias": "D",
}


def layouts(name: str) -> list[str]:
    """Layouts told apart by shape where none is given; the first is the parameter tree's own."""
    axes = AXES[name]
    heads = "N H" if "N H" in axes else "K H"
    if heads not in axes:
        return [axes]
    found = [axes.replace(heads, heads.replace(" ", "")), axes]
    if axes.startswith("D "):
        found.append(f"{heads[0]} D H")  # einsum "BTD,NDH->BTNH"
    return found


_BLOCK = r"(?:.*/)?(?:layers?|blocks?)(?:[/_](\d+))?/"
_ATTENTION = r"(?:(?:self_attn|self_attention|attn|attention)/)?"
_FFN = r"(?:(?:mlp|ffn|feed_forward)/)?"

# Ours -> theirs, besides ours itself: Meta's Llama, and usual nnx and Linen code.
_ATTENTION_NAMES = {
    "q_proj": "|wq|query|q_einsum",
    "k_proj": "|wk|key|k_einsum",
    "v_proj": "|wv|value|v_einsum",
    "o_proj": "|wo|out|attn_vec_einsum",
}
_FFN_NAMES = {"gate_proj": "|w1|gate", "up_proj": "|w3|up", "down_proj": "|w2|down", "fc_in": "|fc1", "fc_out": "|fc2"}
_NORM_NAMES = {
    "input_layernorm": "|attention_norm|pre_attention_norm",
    "post_attention_layernorm": "|ffn_norm|mlp_norm|pre_ffw_norm",
    "pre_feedforward_layernorm": "",
    "post_feedforward_layernorm": "",
}


def _rules():
    for part, names in ((_ATTENTION, _ATTENTION_NAMES), (_FFN, _FFN_NAMES)):
        for ours, others in names.items():
            module = rf"{_BLOCK}{part}(?:{ours}{others})"
            transposed = " ".join(reversed(layouts(ours)[0].split()))
            yield rf"{module}(?:/(?:kernel|w))?", rf"blocks/\1/{ours}"
            yield rf"{module}/weight", (rf"blocks/\1/{ours}", transposed)
            yield rf"{module}/(?:bias|b)", rf"blocks/\1/{ours}_bias"
    gain = r"(?:/(?:scale|w|weight))?"
    for name in ("q_norm", "k_norm"):
        yield rf"{_BLOCK}{_ATTENTION}{name}{gain}", rf"blocks/\1/{name}"
    for ours, others in _NORM_NAMES.items():
        yield rf"{_BLOCK}(?:{ours}{others}){gain}", rf"blocks/\1/{ours}"
    outside = r"(?!.*(?:layers?|blocks?)[/_])(?:.*/)?"
    embed = r"(?:embed_tokens|embedder|embed|embedding|tok_embeddings|token_embed)"
    yield rf"{outside}{embed}(?:/(?:embedding|input_embedding|weight|w))?", "embed_tokens"
    yield rf"{outside}(?:norm|final_norm){gain}", "norm"
    yield rf"{outside}(?:lm_head|output)(?:/(?:kernel|w))?", "lm_head"
    yield rf"{outside}(?:lm_head|output)/weight", ("lm_head", "V D")


# As `Rename`, compiled. The stacked form of a rule is the same without the block's number.
DEFAULT_RENAME: tuple[tuple[re.Pattern, str | tuple[str, str] | None], ...] = tuple(
    (re.compile(pattern), target) for pattern, target in _rules()
)

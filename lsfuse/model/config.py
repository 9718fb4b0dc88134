"""What a model is: a frozen, hashable description that fixes every parameter's shape.

A model is a tuple of blocks that need not be alike: any FFN width (0 = no FFN), attention or none. Consecutive blocks
of the same structure form a *run*, stored stacked and executed by one loop, so that compile time grows with the
number of runs and not with depth. Windows, rotary bases and what a block stands beside are no part of the structure:
they are data of the loop, so that full and sliding attention may alternate in one run.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import ClassVar

from lsfuse.model.shards import Shards

ATTENTION_KINDS = ("full", "sliding", "linear_map", "none")
FFN_KINDS = ("gated", "plain")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
ROPE_KINDS = ("llama3", "linear", "yarn")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Rescaled rotary frequencies.

    kind: "linear" divides every frequency by `factor`; "llama3" divides the long wavelengths by `factor` and blends
        those between `original_max_position / high_freq_factor` and `original_max_position / low_freq_factor`;
        "yarn" (arXiv 2309.00071) divides those that turn less than `beta_slow` times within `original_max_position` by
        `factor`, keeps those that turn more than `beta_fast` times, and blends in between.
    attention_factor: yarn, what queries and keys are multiplied by; None is the paper's 0.1 ln(factor) + 1.
    truncate: yarn, whether the borders of the blend are rounded to whole rotary pairs.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self):
        if self.kind not in ROPE_KINDS:
            raise ValueError(f"rope scaling {self.kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
        if not self.factor > 0:
            raise ValueError(f"rope scaling factor must be positive, got {self.factor}")
        if self.original_max_position < 1:
            raise ValueError(f"rope scaling original_max_position must be at least 1, got {self.original_max_position}")
        if self.kind == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"rope scaling llama3 needs low_freq_factor < high_freq_factor, got {self.low_freq_factor} and"
                f" {self.high_freq_factor}"
            )
        if self.kind == "yarn" and not 0 < self.beta_slow < self.beta_fast:
            raise ValueError(
                f"rope scaling yarn needs 0 < beta_slow < beta_fast, got {self.beta_slow} and {self.beta_fast}"
            )
        if self.attention_factor is not None and self.attention_factor <= 0:
            raise ValueError(f"rope scaling attention_factor must be positive, got {self.attention_factor}")


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """One block.

    attention: "full" (causal), "sliding" (causal, within `window`), "linear_map" (a matrix [D, D] applied to each token
        by itself, which is what is left of attention when a token sees nothing but itself; Puzzle, arXiv 2411.19146),
        or "none". A linear map has no keys and values, and so no state.
    num_kv_heads: kv heads of this block; ignored without keys and values.
    ffn_width: hidden channels F of the FFN; 0 means no FFN.
    parallel: attention and FFN both read the block's input and are summed, instead of one after the other.
    beside: the block reads what the block before it read, and adds its contribution to that one's output: blocks
        f, g of which g is beside f make x + (f(x) - x) + (g(x) - x) (FFN Fusion, arXiv 2503.18908, sec. 6).
    window: keys that a token sees with sliding attention, itself included; None with any other.
    local_rope: rotary embedding by the model's `local_rope_theta` and `local_rope_scaling` (Gemma 3's sliding blocks).
    ffn: "gated", down(act(gate(x)) * up(x)), or "plain", fc_out(act(fc_in(x))).
    """

    attention: str = "full"
    num_kv_heads: int = 1
    ffn_width: int = 0
    parallel: bool = False
    window: int | None = None
    local_rope: bool = False
    ffn: str = "gated"
    beside: bool = False

    @property
    def structure(self) -> "BlockConfig":
        """The block without what is data of a run's loop: its window, its rotary base, what it stands beside."""
        attention = "full" if self.has_attention else self.attention
        return dataclasses.replace(self, attention=attention, window=None, local_rope=False, beside=False)

    @property
    def has_attention(self) -> bool:
        """Whether the block has keys and values."""
        return self.attention in ("full", "sliding")

    @property
    def has_linear_map(self) -> bool:
        return self.attention == "linear_map"

    @property
    def has_mixer(self) -> bool:
        """Whether anything, attention or a linear map, comes before the FFN or beside it."""
        return self.attention != "none"

    @property
    def has_ffn(self) -> bool:
        return self.ffn_width > 0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only language model. Frozen and hashable, so that it can be a static argument of `jax.jit`.

    hidden_act is the activation of the FFNs. The bias flags say which projections have one (Qwen2: qkv). family is the
    Hugging Face `model_type` the model is exported as. sources and transforms say how a model came out of another
    (`lsfuse.fusion`): of which of its blocks each block is made, and what was done.

    qk_norm: queries and keys are normalised head by head before rotation (Qwen3, Gemma 3).
    post_norms: the outputs of attention and FFN are normalised before they join the residual stream (Gemma 2, 3).
    norm_offset: every norm multiplies by its parameter plus this (Gemma: 1).
    embed_scale: embeddings are multiplied by it (Gemma: sqrt(hidden_size)), rounded to their dtype as they are.
    query_pre_attn_scalar: scores are divided by its square root; None is head_dim.
    attn_logit_softcapping, final_logit_softcapping: c in c · tanh(s / c) of scores and of logits; None: none.
    local_rope_theta, local_rope_scaling: rotary embedding of the blocks with `local_rope`.
    """

    vocab_size: int
    hidden_size: int
    num_heads: int
    head_dim: int
    blocks: tuple[BlockConfig, ...]
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    family: str = "llama"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    qk_norm: bool = False
    post_norms: bool = False
    norm_offset: float = 0.0
    embed_scale: float = 1.0
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    local_rope_theta: float | None = None
    local_rope_scaling: RopeScaling | None = None
    sources: tuple[tuple[int, ...], ...] = ()
    transforms: tuple[str, ...] = ()

    # A whole model, computed in its parameters' dtype; see `DeviceConfig`.
    shards: ClassVar[Shards] = Shards()
    compute_dtype: ClassVar[str | None] = None
    state_dtype: ClassVar[str | None] = None

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "num_heads", "head_dim", "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise ValueError(f"ModelConfig.{name} must be at least 1, got {getattr(self, name)}")
        if self.head_dim % 2:
            raise ValueError(f"ModelConfig.head_dim must be even (rotary pairs), got {self.head_dim}")
        if self.hidden_act not in ACTIVATIONS:
            raise ValueError(
                f"ModelConfig.hidden_act {self.hidden_act!r} is not supported; supported: {', '.join(ACTIVATIONS)}"
            )
        for name in ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "local_rope_theta"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"ModelConfig.{name} must be positive or None, got {value}")
        if not self.rope_theta > 0:
            raise ValueError(f"ModelConfig.rope_theta must be positive, got {self.rope_theta}")
        if not self.rms_norm_eps > 0:
            raise ValueError(f"ModelConfig.rms_norm_eps must be positive (padding is zero), got {self.rms_norm_eps}")
        if not self.embed_scale > 0:
            raise ValueError(f"ModelConfig.embed_scale must be positive, got {self.embed_scale}")
        if not self.blocks:
            raise ValueError("ModelConfig.blocks is empty; a model needs at least one block")
        if self.sources and len(self.sources) != len(self.blocks):
            raise ValueError(f"ModelConfig.sources names {len(self.sources)} blocks, the model has {len(self.blocks)}")
        if self.blocks[0].beside:
            raise ValueError("block 0: there is no block before it that it could stand beside")
        for i, block in enumerate(self.blocks):
            if block.attention not in ATTENTION_KINDS:
                raise ValueError(
                    f"block {i}: attention {block.attention!r} is not supported; supported:"
                    f" {', '.join(ATTENTION_KINDS)}"
                )
            if (block.attention == "sliding") != (block.window is not None):
                raise ValueError(
                    f"block {i}: window {block.window} does not go with attention {block.attention!r}; sliding"
                    " attention needs a window, and nothing else has one"
                )
            if block.window is not None and block.window < 1:
                raise ValueError(f"block {i}: window must be at least 1 (the token itself), got {block.window}")
            if block.local_rope and self.local_rope_theta is None:
                raise ValueError(f"block {i}: local_rope needs ModelConfig.local_rope_theta, which is None")
            if block.ffn not in FFN_KINDS:
                raise ValueError(f"block {i}: ffn {block.ffn!r} is not supported; supported: {', '.join(FFN_KINDS)}")
            if block.ffn_width < 0:
                raise ValueError(f"block {i}: ffn_width must be 0 (no FFN) or more, got {block.ffn_width}")
            if block.has_attention and (block.num_kv_heads < 1 or self.num_heads % block.num_kv_heads):
                raise ValueError(
                    f"block {i}: num_kv_heads {block.num_kv_heads} must divide the {self.num_heads} query heads"
                )

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def runs(self) -> tuple[tuple[BlockConfig, int], ...]:
        """(structure, number of consecutive blocks that share it), in order."""
        structures = (block.structure for block in self.blocks)
        return tuple((block, len(list(same))) for block, same in itertools.groupby(structures))

    @property
    def has_beside(self) -> bool:
        """Whether any blocks run in parallel."""
        return any(block.beside for block in self.blocks)

    def members(self, run: int) -> tuple[BlockConfig, ...]:
        """The blocks of a run, with their windows, rotary bases and places."""
        first = sum(n for _, n in self.runs[:run])
        return self.blocks[first : first + self.runs[run][1]]

    @property
    def last_attention_block(self) -> int:
        """Index of the last block with attention, -1 if there is none. Prefix tokens need no block beyond it."""
        return max((i for i, block in enumerate(self.blocks) if block.has_attention), default=-1)


@dataclasses.dataclass(frozen=True)
class DeviceConfig(ModelConfig):
    """A model as one device of a mesh has it, inside a `shard_map`: with the device's own heads and channels. Its
    kernels are split further, see `Shards`.

    compute_dtype: of activations, and of kernels from where they are gathered on; None: the parameters'.
    state_dtype: of the prefix state; None: that of activations.
    """

    shards: Shards = Shards()  # type: ignore[misc]
    compute_dtype: str | None = None  # type: ignore[misc]
    state_dtype: str | None = None  # type: ignore[misc]


def device_config(
    config: ModelConfig, shards: Shards, compute_dtype: str | None = None, state_dtype: str | None = None
) -> DeviceConfig:
    """Raises ValueError, naming sizes that would do, where the model does not divide by the mesh."""
    t, n = shards.num_tensor, shards.num_tokens
    check_divides("tensor", t, {"num_heads": config.num_heads})
    for i, block in enumerate(config.blocks):
        if block.has_attention:
            check_divides("tensor", t, {f"num_kv_heads of block {i}": block.num_kv_heads})
        check_divides("tensor", t, {f"ffn_width of block {i}": block.ffn_width})
    check_divides("context x fsdp", n, {"hidden_size": config.hidden_size})
    check_divides("context x fsdp x tensor", n * t, {"vocab_size": config.vocab_size})
    blocks = tuple(
        dataclasses.replace(
            block,
            num_kv_heads=block.num_kv_heads // t if block.has_attention else block.num_kv_heads,
            ffn_width=block.ffn_width // t,
        )
        for block in config.blocks
    )
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(ModelConfig)}
    own = {"blocks": blocks, "num_heads": config.num_heads // t, "shards": shards}
    return DeviceConfig(**{**fields, **own, "compute_dtype": compute_dtype, "state_dtype": state_dtype})


def check_divides(axes: str, devices: int, sizes: dict[str, int]) -> None:
    """Raises ValueError, naming numbers of devices that would do, unless `devices` divides every size."""
    for name, size in sizes.items():
        if size % devices:
            fitting = [str(d) for d in range(1, min(size, 4 * devices) + 1) if size % d == 0]
            raise ValueError(
                f"{name} is {size}, which the mesh's {devices} devices along {axes} do not divide; such that do:"
                f" {', '.join(fitting)}"
            )


def uniform_blocks(num_blocks: int, num_kv_heads: int, ffn_width: int) -> tuple[BlockConfig, ...]:
    """`num_blocks` ordinary transformer blocks, all alike."""
    return (BlockConfig("full", num_kv_heads, ffn_width),) * num_blocks


def block_param_shapes(config: ModelConfig, block: BlockConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of one block; kernels are (in, out)."""
    d, q = config.hidden_size, config.num_heads * config.head_dim
    kv = block.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    if block.has_attention:
        shapes |= {"input_layernorm": (d,), "q_proj": (d, q), "k_proj": (d, kv), "v_proj": (d, kv), "o_proj": (q, d)}
        if config.qkv_bias:
            shapes |= {"q_proj_bias": (q,), "k_proj_bias": (kv,), "v_proj_bias": (kv,)}
        if config.o_bias:
            shapes["o_proj_bias"] = (d,)
        if config.qk_norm:
            shapes |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    if block.has_linear_map:
        shapes |= {"input_layernorm": (d,), "linear_attn": (d, d)}
        if config.qkv_bias or config.o_bias:
            shapes["linear_attn_bias"] = (d,)
    if block.has_mixer and config.post_norms:
        shapes["post_attention_layernorm"] = (d,)
    if block.has_ffn:
        f = block.ffn_width
        shapes[ffn_norm(config)] = (d,)
        matrices = {"gate_proj": (d, f), "up_proj": (d, f), "down_proj": (f, d)}
        if block.ffn == "plain":
            matrices = {"fc_in": (d, f), "fc_out": (f, d)}
        shapes |= matrices
        if config.mlp_bias:
            shapes |= {f"{name}_bias": shape[1:] for name, shape in matrices.items()}
        if config.post_norms:
            shapes["post_feedforward_layernorm"] = (d,)
    return shapes


def ffn_norm(config: ModelConfig) -> str:
    """Name of the norm before the FFN. Hugging Face calls it after what stands before it, unless that has its own."""
    return "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"


def param_shapes(config: ModelConfig) -> dict:
    """Shape of every parameter, in the nesting of the parameter tree; blocks of a run are stacked on axis 0."""
    runs = {
        str(r): {name: (n, *shape) for name, shape in block_param_shapes(config, block).items()}
        for r, (block, n) in enumerate(config.runs)
    }
    shapes = {
        "embed_tokens": (config.vocab_size, config.hidden_size),
        "runs": runs,
        "norm": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head"] = (config.hidden_size, config.vocab_size)
    return shapes


def locate_block(config: ModelConfig, index: int) -> tuple[int, int]:
    """(run, position inside the run) of block `index`."""
    if not 0 <= index < config.num_blocks:
        raise IndexError(f"block {index} is out of range; the model has blocks 0 to {config.num_blocks - 1}")
    for run, (_, n) in enumerate(config.runs):
        if index < n:
            return run, index
        index -= n
    raise AssertionError("unreachable")


def replace_blocks(config: ModelConfig, blocks: Sequence[BlockConfig]) -> ModelConfig:
    return dataclasses.replace(config, blocks=tuple(blocks))

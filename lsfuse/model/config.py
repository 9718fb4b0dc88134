"""What a model is: a frozen, hashable description that fixes every parameter's shape.

A model is a tuple of blocks that need not be alike: any FFN width (0 = no FFN), attention or none. Consecutive blocks
of the same structure form a *run*, stored stacked and executed by one loop, so that compile time grows with the
number of runs and not with depth.
"""

import dataclasses
import itertools
from collections.abc import Sequence

ATTENTION_KINDS = ("full", "none")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
ROPE_KINDS = ("llama3", "linear")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Rescaled rotary frequencies.

    kind: "linear" divides every frequency by `factor`; "llama3" divides the long wavelengths by `factor` and blends
        those between `original_max_position / high_freq_factor` and `original_max_position / low_freq_factor`.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self):
        if self.kind not in ROPE_KINDS:
            raise ValueError(f"rope scaling {self.kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
        if self.factor <= 0:
            raise ValueError(f"rope scaling factor must be positive, got {self.factor}")
        if self.kind == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"rope scaling llama3 needs low_freq_factor < high_freq_factor, got {self.low_freq_factor} and"
                f" {self.high_freq_factor}"
            )


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """One block.

    attention: "full" (causal) or "none".
    num_kv_heads: kv heads of this block; ignored without attention.
    ffn_width: hidden channels F of the gated FFN; 0 means no FFN.
    parallel: attention and FFN both read the block's input and are summed, instead of one after the other.
    """

    attention: str = "full"
    num_kv_heads: int = 1
    ffn_width: int = 0
    parallel: bool = False

    @property
    def has_attention(self) -> bool:
        return self.attention != "none"

    @property
    def has_ffn(self) -> bool:
        return self.ffn_width > 0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only language model. Frozen and hashable, so that it can be a static argument of `jax.jit`.

    hidden_act is the activation of the gated FFN, down(act(gate(x)) * up(x)). The bias flags say which projections
    have one (Qwen2: qkv). family is the Hugging Face `model_type` the model is exported as. sources and transforms say
    how a model came out of another (`lsfuse.fusion`): of which of its blocks each block is made, and what was done.
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
    sources: tuple[tuple[int, ...], ...] = ()
    transforms: tuple[str, ...] = ()

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
        if not self.blocks:
            raise ValueError("ModelConfig.blocks is empty; a model needs at least one block")
        if self.sources and len(self.sources) != len(self.blocks):
            raise ValueError(f"ModelConfig.sources names {len(self.sources)} blocks, the model has {len(self.blocks)}")
        for i, block in enumerate(self.blocks):
            if block.attention not in ATTENTION_KINDS:
                raise ValueError(
                    f"block {i}: attention {block.attention!r} is not supported; supported:"
                    f" {', '.join(ATTENTION_KINDS)}"
                )
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
        """(block, number of consecutive blocks like it), in order."""
        return tuple((block, len(list(same))) for block, same in itertools.groupby(self.blocks))

    @property
    def last_attention_block(self) -> int:
        """Index of the last block with attention, -1 if there is none. Prefix tokens need no block beyond it."""
        return max((i for i, block in enumerate(self.blocks) if block.has_attention), default=-1)


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
    if block.has_ffn:
        f = block.ffn_width
        shapes |= {"post_attention_layernorm": (d,), "gate_proj": (d, f), "up_proj": (d, f), "down_proj": (f, d)}
        if config.mlp_bias:
            shapes |= {"gate_proj_bias": (f,), "up_proj_bias": (f,), "down_proj_bias": (d,)}
    return shapes


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

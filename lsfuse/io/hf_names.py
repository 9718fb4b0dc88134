"""Which tensor of a Hugging Face checkpoint is which leaf of the parameter tree.

Hugging Face stores kernels (out, in) and one tensor per block; here they are (in, out) and a run of equal blocks is
stacked. Names within a block are Llama's, which the other families share and extend.
"""

import dataclasses
import math
from collections.abc import Iterator

from lsfuse.model.config import ModelConfig, block_param_shapes

EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_PIECE_BYTES = 16 * 2**20


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """One tensor of the checkpoint and where it lies in the parameter tree.

    name, shape: in the checkpoint. path: keys into the parameter tree. index: position on axis 0 of a stacked leaf,
    None for a leaf that is not stacked. transposed: the leaf holds the transpose.
    """

    name: str
    shape: tuple[int, ...]
    path: tuple[str, ...]
    index: int | None = None
    transposed: bool = False

    def start(self, row: int) -> tuple[int, ...]:
        """Where in the leaf the checkpoint's row `row` begins."""
        inner = (0,) * (len(self.shape) - 1)
        inner = (*inner, row) if self.transposed else (row, *inner)
        return inner if self.index is None else (self.index, *inner)

    def extent(self, rows: int) -> tuple[int, ...]:
        """Shape, in the leaf, of `rows` rows of the checkpoint's tensor."""
        inner = (rows, *self.shape[1:])
        inner = inner[::-1] if self.transposed else inner
        return inner if self.index is None else (1, *inner)

    def pieces(self, itemsize: int) -> Iterator[tuple[int, int]]:
        """(start, stop) rows of pieces of at most about 16 MiB, in order, all of one size but the last."""
        rows = max(1, _PIECE_BYTES // max(1, math.prod(self.shape[1:]) * itemsize))
        for start in range(0, self.shape[0], rows):
            yield start, min(start + rows, self.shape[0])


def block_tensor_name(block: int, leaf: str) -> str:
    """`q_proj` → model.layers.3.self_attn.q_proj.weight, and so on."""
    module, kind = (leaf.removesuffix("_bias"), "bias") if leaf.endswith("_bias") else (leaf, "weight")
    if module in ("q_norm", "k_norm", "linear_attn") or (module.endswith("_proj") and module[0] in "qkvo"):
        module = f"self_attn.{module}"
    elif module.endswith("_proj") or module.startswith("fc_"):
        module = f"mlp.{module}"
    return f"model.layers.{block}.{module}.{kind}"


def tensor_specs(config: ModelConfig) -> list[TensorSpec]:
    """Every tensor of the checkpoint of `config`, in the order of the forward pass."""
    specs = [TensorSpec(EMBED, (config.vocab_size, config.hidden_size), ("embed_tokens",))]
    number = 0
    for run, (block, count) in enumerate(config.runs):
        for index in range(count):
            for leaf, shape in block_param_shapes(config, block).items():
                matrix = len(shape) == 2
                name = block_tensor_name(number, leaf)
                specs.append(TensorSpec(name, shape[::-1], ("runs", str(run), leaf), index, transposed=matrix))
            number += 1
    specs.append(TensorSpec(NORM, (config.hidden_size,), ("norm",)))
    if not config.tie_word_embeddings:
        specs.append(TensorSpec(HEAD, (config.vocab_size, config.hidden_size), ("lm_head",), transposed=True))
    return specs

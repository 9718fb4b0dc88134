"""What a checkpoint is made of, without reading a tensor.

    python -m experiments.describe --model=SmolLM2-135M-Instruct
    python -m experiments.describe --model=runs/fused --devices=4 --out=runs/fused_described
    python -m experiments.describe --model=../shared/data/nemotron_blocks.json --table=llama-3.1-nemotron-ultra-253b

--model names a folder with config.json, a config.json by itself (shapes only), or a file of block tables (name ->
"config", as in config.json, and "blocks": [kv heads, FFN width, …] each), of which --table chooses one. Prints blocks,
parameters, KV bytes per token, the widest block, and which blocks go on which of --devices devices, balanced by the
bytes of their weights. --tensor_parallel=N: an error if N devices cannot share every block evenly. --out: a folder for
table.txt, rows.csv and rows.json.
"""

import pathlib
import sys

import jax.numpy as jnp
from absl import app, flags

from experiments.tables import check_out, write_table
from lsfuse.fusion import describe
from lsfuse.io.hf_config import config_from_hf, read_config, read_json
from lsfuse.io.hf_load import resolve_hf
from lsfuse.model import ModelConfig


def read_model(path: str, table: str | None) -> ModelConfig:
    """Raises ValueError or FileNotFoundError, naming what is there and what is asked for."""
    file = pathlib.Path(path).expanduser()
    if not file.is_file():
        if table is not None:
            raise ValueError(f"--table={table} needs a file of block tables, and {path} is none")
        return read_config(resolve_hf(path))
    raw = read_json(file)
    if "model_type" in raw:
        return config_from_hf(raw, path)
    tables = [name for name, entry in raw.items() if isinstance(entry, dict) and {"config", "blocks"} <= entry.keys()]
    if not tables:
        raise ValueError(f"{path} is neither a config.json (no model_type) nor a file of block tables")
    if table not in tables:
        raise ValueError(f"--table={table} is not in {path}; choose one of {', '.join(tables)}")
    return from_table(raw[table], f"{path}, {table}")


def from_table(entry: dict, source: str) -> ModelConfig:
    """A nemotron-nas model from a published table; sizes that the table leaves out are those of Llama.

    Raises: ValueError for a table that has not that form.
    """
    heads = entry["config"].get("num_attention_heads") if isinstance(entry["config"], dict) else None
    if type(heads) is not int or heads < 1:
        raise ValueError(f'{source}: "config" needs "num_attention_heads", a whole number from 1, got {heads!r}')
    for i, row in enumerate(entry["blocks"] if isinstance(entry["blocks"], list) else [entry["blocks"]]):
        if not isinstance(row, list) or len(row) < 2 or any(type(n) is not int or n < 0 for n in row[:2]):
            raise ValueError(f"{source}: block {i} must be [kv heads, FFN width, …], whole numbers, got {row!r}")
    blocks = [
        {
            "attention": {"no_op": not kv, "n_heads_in_group": heads // kv if kv else None},
            "ffn": {"no_op": not width, "intermediate_size": width},
        }
        for kv, width, *_ in entry["blocks"]
    ]
    common = {"model_type": "nemotron-nas", "rms_norm_eps": 1e-5, "max_position_embeddings": 131072}
    return config_from_hf({**common, **entry["config"], "block_configs": blocks}, source)


def report(config: ModelConfig, devices: int, dtype: str) -> str:
    lines = [f"{name:<22}{value:>20,}" for name, value in describe.summarize(config, dtype).items()]
    lines += ["", describe.format_blocks(config, dtype), ""]
    stages = describe.place(config, devices, dtype)
    lines.append(f"{'device':>9}  {'blocks':<12}{'GiB':>10}{'KV bytes/token':>16}")
    kv = [row["KV bytes"] for row in describe.block_rows(config, dtype)]
    for n, s in enumerate(stages):
        span, held = f"{s.first}-{s.last}", sum(kv[s.first : s.last + 1])
        lines.append(f"{n:>9}  {span:<12}{s.nbytes / 2**30:>10.3f}{held:>16,}")
    fullest, mean = max(s.nbytes for s in stages), sum(s.nbytes for s in stages) / len(stages)
    lines.append(f"{'':>9}  fullest / mean {fullest / mean:.3f}; weights only, before activations")
    for transform in config.transforms:
        lines.append(f"made by {transform}")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    del argv
    try:
        out = check_out(flags.FLAGS.out) if flags.FLAGS.out else None
        config = read_model(flags.FLAGS.model, flags.FLAGS.table)
        describe.check_tensor_parallel(config, flags.FLAGS.tensor_parallel)
        text = report(config, flags.FLAGS.devices, flags.FLAGS.dtype)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(text)
    if out:
        stages = describe.place(config, flags.FLAGS.devices, flags.FLAGS.dtype)
        device = [n for n, s in enumerate(stages) for _ in range(s.first, s.last + 1)]
        rows = [
            {**row, "device": d}
            for row, d in zip(describe.block_rows(config, jnp.dtype(flags.FLAGS.dtype)), device, strict=True)
        ]
        setting = {
            "model": flags.FLAGS.model,
            "dtype": flags.FLAGS.dtype,
            **describe.summarize(config, flags.FLAGS.dtype),
        }
        write_table(out, text, rows, setting)
        print(f"written to {out}")


def define_flags() -> None:
    """Only where this is the program: others that are imported beside it name a flag "out", too."""
    flags.DEFINE_string("model", None, "Checkpoint folder, config.json, or file of block tables.", required=True)
    flags.DEFINE_string("table", None, "Which of a file's block tables.")
    flags.DEFINE_integer("devices", 1, "Devices that share the blocks.", lower_bound=1)
    flags.DEFINE_integer("tensor_parallel", 1, "Devices that share each block.", lower_bound=1)
    flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float16", "float32"], "Of weights, keys and values.")
    flags.DEFINE_string("out", None, "Folder for the tables; printed only if not given.")


if __name__ == "__main__":
    define_flags()
    app.run(main)

"""Builds a data set that tensorflow-datasets, `lsfuse.data.load` and `config.task.name=dataset` read (array_record).

    python -m experiments.build_dataset --name=gsm8k --split=train=train.jsonl --split=test=test.jsonl
    python -m experiments.build_dataset --name=prompts/mine --split=train=prompts.jsonl --data_dir=data
    python -m experiments.build_dataset --name=groups/mine --split=train=groups.jsonl
    python -m experiments.build_dataset --name=retrieval --split=train=10000 --split=eval=500 --field=prompt_length=512

Prompts are lines {"prompt": "…", "answer": "…"}; groups those of `lsfuse.data.JsonlGroups`. Every line is checked
before anything is written, and the data set appears whole or not at all. Needs the extra: pip install 'lsfuse[data]'.
"""

import ast
import dataclasses
import sys

from absl import app, flags

from experiments.launch import is_users
from lsfuse.data import RetrievalTask
from lsfuse.data.datasets import data_root, extra

_NAME = flags.DEFINE_string("name", None, "retrieval, gsm8k, prompts/NAME or groups/NAME.")
_SPLIT = flags.DEFINE_multi_string("split", [], "SPLIT=FILE.jsonl, or SPLIT=COUNT for retrieval; once a split.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Where; default $TFDS_DATA_DIR, else ~/tensorflow_datasets.")
_FIELD = flags.DEFINE_multi_string("field", [], "FIELD=VALUE of the retrieval task.")


def pairs(flag: str, given: list[str]) -> dict[str, str]:
    """{"a": "b"} from texts "a=b"."""
    found: dict[str, str] = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not sign or not name or not value:
            raise ValueError(f"--{flag}={text}: write --{flag}=NAME=VALUE")
        if name in found:
            raise ValueError(f"--{flag}={text}: {name} is given twice")
        found[name] = value
    return found


def retrieval_task(given: dict[str, str]) -> RetrievalTask:
    known = {f.name for f in dataclasses.fields(RetrievalTask)} - {"score"}
    values = {}
    for name, text in given.items():
        if name not in known:
            raise ValueError(f"--field={name}: the retrieval task has {', '.join(sorted(known))}")
        try:
            values[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            raise ValueError(f"--field={name}={text}: not a number, True, False or None") from None
    return RetrievalTask(**values)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise ValueError(f"unexpected argument {argv[1]!r}: flags start with --")
    if _NAME.value is None:
        raise ValueError("--name is missing: retrieval, gsm8k, prompts/NAME or groups/NAME")
    sources = pairs("split", _SPLIT.value)
    more = {}
    if _NAME.value == "retrieval":
        for split, count in sources.items():
            if not count.isdigit():
                raise ValueError(f"--split={split}={count}: retrieval is generated; give a number of examples")
        more["task"] = retrieval_task(pairs("field", _FIELD.value))
    elif _FIELD.value:
        raise ValueError("--field is for --name=retrieval only")
    extra("tensorflow_datasets", "data")
    from lsfuse.data.builders import build

    folder = build(_NAME.value, sources, _DATA_DIR.value, progress=True, **more)
    tfds = extra("tensorflow_datasets", "data")
    print(f"{_NAME.value} in {data_root(_DATA_DIR.value)}")
    for split, info in tfds.builder_from_directory(str(folder)).info.splits.items():
        size = sum(file.stat().st_size for file in folder.glob(f"*-{split}.array_record*"))
        print(f"  {split:<12}{info.num_examples:>10,} records{size:>14,} bytes in {info.num_shards} shard(s)")


if __name__ == "__main__":
    app.define_help_flags()
    try:
        main(flags.FLAGS(sys.argv))
    except KeyboardInterrupt:
        sys.exit("stopped; nothing was built")
    except Exception as error:
        if not isinstance(error, flags.Error) and not is_users(error):
            raise
        sys.exit(f"error: {' '.join(str(error).split())}")

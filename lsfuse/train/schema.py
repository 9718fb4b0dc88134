"""Every field of a config: default, allowed types, what it means. Config files only set values.

A field that may be of several types, or None, is stored so that the command line takes any of them
(`--config.replay.prefix_grad=4`, `=stop`, `--config.rl.old_logps=none`).
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict, config_dict

from lsfuse.data import REWARDS
from lsfuse.model import REMAT_POLICIES
from lsfuse.replay import DTYPES, PREFIXES
from lsfuse.rl import BASELINES, DPO_LOSS_TYPES, IMPORTANCE_LEVELS, KL_KINDS, LOSS_AGG_MODES, SCALES
from lsfuse.train.optimizer_names import check_name

# Sizes, steps and positions are int32 on a device: the bound of every int field that names no maximum of its own.
LARGEST_INT = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Field:
    """default; help; types allowed beyond the default's own; valid values; inclusive bounds of numbers; a function
    (name of the field, value) that raises ValueError for what these do not tell."""

    default: Any
    help: str
    types: tuple[type, ...] = ()
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    check: Callable[[str, Any], None] | None = None

    @property
    def allowed(self) -> tuple[type, ...]:
        return tuple(dict.fromkeys((type(self.default), *self.types)))


_NONE = type(None)
TASKS = ("retrieval", "gsm8k", "groups", "dataset", "reasoning_gym")
OBJECTIVE_NAMES = ("grpo", "dr_grpo", "dapo", "gspo", "gspo_token", "cispo", "reinforce", "rloo", "dpo", "nll")


def optimizer_fields(learning_rate: float) -> dict[str, Field]:
    return {
        "name": Field(
            "adamw", "an optimizer of optax (adamw, lion, muon, …), or package.module:function", check=check_name
        ),
        "learning_rate": Field(learning_rate, "peak learning rate", minimum=0),
        "schedule": Field("constant", "after the warmup", choices=("constant", "linear", "cosine")),
        "warmup_steps": Field(0, "steps over which the learning rate rises from 0", minimum=0),
        # The optimizer gets those of these four that it has; None leaves it its own default.
        "b1": Field(0.9, "decay of the first moment (adam, lion); momentum of sgd", (_NONE,), minimum=0, maximum=1),
        "b2": Field(0.95, "decay of the second moment (adam); of lion's momentum", (_NONE,), minimum=0, maximum=1),
        "eps": Field(1e-8, "Adam's epsilon", (_NONE,), minimum=0),
        "weight_decay": Field(0.0, "decoupled (adamw, lion, …); norms and biases are left out", (_NONE,), minimum=0),
        "clip_norm": Field(1.0, "largest global gradient norm; None does not clip", (_NONE,), minimum=0),
        "trainable": Field(
            None, "regular expression found in the paths (runs/0/q_proj) of what is trained; None: all", (str,)
        ),
    }


SCHEMA: dict[str, Any] = {
    "seed": Field(0, "of everything random: parameters, order of examples, sampling", minimum=0, maximum=2**32 - 1),
    "dtype": Field(
        "float32", "of the parameters and all that follows them", choices=("float32", "bfloat16", "float16")
    ),
    # The devices of the run: it may be resumed on others, and then is the same to rounding.
    "mesh": {
        "data": Field(1, "devices that split the groups of a step", minimum=1),
        "context": Field(1, "devices that split token positions: the prompt's state, and parameters", minimum=1),
        "fsdp": Field(1, "as context, which it multiplies", minimum=1),
        "tensor": Field(1, "devices that split heads, FFN channels and the vocabulary", minimum=1),
    },
    "model": {
        "path": Field(
            None, "folder (or hub id) in Hugging Face layout; None: random parameters, shapes as below", (str,)
        ),
        "vocab_size": Field(
            None, "V, rows of the embedding; None: the tokenizer's. More divide by a mesh", (int,), minimum=1
        ),
        "hidden_size": Field(128, "D", minimum=1),
        "num_blocks": Field(2, "blocks, all alike", minimum=1, maximum=10_000),
        "num_heads": Field(4, "query heads", minimum=1),
        "num_kv_heads": Field(2, "key and value heads", minimum=1),
        "head_dim": Field(32, "H, even", minimum=2),
        "ffn_width": Field(384, "hidden channels of the gated FFN", minimum=0),
        "max_position_embeddings": Field(2048, "longest prompt and response together", minimum=1),
        "rope_theta": Field(10000.0, "base of the rotary frequencies", minimum=1),
        "qk_norm": Field(False, "whether queries and keys are normed (Qwen3)"),
        "tie_word_embeddings": Field(True, "whether the head is the embedding's transpose"),
    },
    "task": {
        "name": Field("retrieval", "where prompts and rewards come from", choices=TASKS),
        "retrieval": {
            "prompt_length": Field(512, "tokens of a prompt", minimum=1),
            "min_prompt_length": Field(None, "shortest prompt; None: all have prompt_length", (int,), minimum=1),
            "num_pairs": Field(4, "key-value pairs in a prompt", minimum=1),
            "answer_length": Field(3, "symbols of a value", minimum=1),
            "num_keys": Field(8, "alphabet of keys", minimum=1, maximum=1_000_000),
            "num_values": Field(16, "alphabet of values", minimum=1, maximum=1_000_000),
            "num_fillers": Field(4, "alphabet of fillers", minimum=1, maximum=1_000_000),
            "distinct_values": Field(True, "no value symbol twice in a prompt"),
            "num_queries": Field(
                None, "questions in a supervised target; None: as many as there are pairs", (int,), minimum=1
            ),
        },
        "gsm8k": {
            "train_path": Field(None, "jsonl with question and answer", (str,)),
            "eval_path": Field(None, "jsonl of held-out problems", (str,)),
            "num_shots": Field(8, "solved problems before the question", minimum=0),
            "prompt_style": Field("plain", "how the shots are written", choices=("plain", "chat")),
            "long_prompts": Field("error", "what to do with prompts over max_prompt", choices=("error", "drop")),
        },
        "groups": {
            "path": Field(None, "jsonl of groups sampled elsewhere: prompt, responses, rewards, …", (str,)),
            "append_stop": Field(False, "whether responses given as text end with the stop token"),
        },
        # What experiments.build_dataset built. Fields of gsm8k and groups above, but for the paths, count here too.
        "dataset": {
            "name": Field(None, "gsm8k, retrieval, prompts/NAME or groups/NAME", (str,)),
            "data_dir": Field(None, "where it was built; None: $TFDS_DATA_DIR, else ~/tensorflow_datasets", (str,)),
            "train_split": Field("train", "as tensorflow-datasets writes it: train, train[:90%]"),
            "eval_split": Field(None, "held-out split; None: eval, test or validation, whichever there is", (str,)),
            "reward": Field(
                "auto",
                "of prompts and retrieval; auto: exact_match, and token_match for retrieval",
                choices=("auto", *REWARDS),
            ),
        },
        "reasoning_gym": {
            "dataset": Field(None, "a name of reasoning-gym's, such as chain_sum", (str,)),
            "train_size": Field(1000, "problems to train on", minimum=1),
            "eval_size": Field(100, "held-out problems", minimum=1),
            "options": Field((), "settings of the generator: ((name, value), …)"),
        },
    },
    "rl": {
        "steps": Field(100, "gradient steps on fresh groups", minimum=0),
        "num_prompts": Field(1, "B, groups a step", minimum=1),
        "num_generations": Field(8, "G, responses a prompt", minimum=1),
        "max_prompt": Field(512, "P, longest prompt: a shape, fixed for the run", minimum=1),
        "max_response": Field(16, "R, longest response: a shape, fixed for the run", minimum=1),
        "temperature": Field(1.0, "of sampling and of every log-prob in the objective", minimum=1e-3),
        "top_p": Field(1.0, "nucleus sampling; 1 is off", minimum=0, maximum=1),
        "num_iterations": Field(1, "updates on each batch of groups", minimum=1),
        "old_logps": Field(
            "auto",
            "log-probs of the sampling policy: none (on-policy, ratio 1), the sampler's own, or a scoring pass; auto:"
            " none for one iteration, else sampler",
            choices=("auto", "none", "sampler", "score"),
        ),
        "advantage_baseline": Field(
            "auto", "what is subtracted from a reward; auto: the objective's own", choices=("auto", *BASELINES)
        ),
        "advantage_scale": Field(
            "auto", "whether advantages are divided by a std; auto: the objective's own", choices=("auto", *SCALES)
        ),
        "overlong_buffer": Field(
            None, "tokens before max_response over which DAPO's penalty grows to -1; None: none", (int,), minimum=1
        ),
        "dynamic_sampling": Field(
            0, "batches a step may sample to be full of groups whose rewards differ (DAPO); 0: off", minimum=0
        ),
        "importance_correction": Field(
            "none",
            "weights for responses whose log-probs another engine computed (the sampler, or the groups' file): one a"
            " token or one a response",
            choices=("none", *IMPORTANCE_LEVELS),
        ),
        "importance_cap": Field(2.0, "largest of these weights", minimum=0),
        "objective": {
            "name": Field("grpo", "what a step minimises", choices=OBJECTIVE_NAMES),
            # None: the default of the objective's factory in `lsfuse.rl`.
            "epsilon": Field(None, "clip range below 1", (float,)),
            "epsilon_high": Field(None, "clip range above 1", (float,)),
            "beta": Field(None, "weight of the KL to the reference (grpo, gspo); dpo's beta", (float,), minimum=0),
            "kl": Field(None, "estimator of that KL (grpo, gspo)", (str,), choices=KL_KINDS),
            "dual_clip": Field(None, "bound on the loss of bad tokens that became likelier (grpo, dapo)", (float,)),
            "loss_agg_mode": Field(None, "how tokens are averaged", (str,), choices=LOSS_AGG_MODES),
            "label_smoothing": Field(None, "share of wrong preferences (dpo)", (float,), minimum=0),
            "loss_type": Field(None, "sigmoid or ipo (dpo)", (str,), choices=DPO_LOSS_TYPES),
            "reference_free": Field(None, "whether the reference is left out (dpo)", (bool,)),
        },
        "optimizer": optimizer_fields(1e-4),
    },
    "warm_start": {
        "steps": Field(0, "supervised steps before RL, on the task's own targets; 0: none", minimum=0),
        "num_prompts": Field(8, "targets a step", minimum=1),
        "max_response": Field(64, "longest target, in tokens", minimum=1),
        "stages": Field(
            (),
            "a curriculum: (steps, num_prompts, ((task field, value), …)) each, with a max_prompt of its own; replaces"
            " steps and num_prompts",
        ),
        "optimizer": optimizer_fields(1e-3),
    },
    "replay": {
        "prefix_grad": Field("exact", '"exact", "stop", or how many prompt tokens carry gradient', (int,), minimum=1),
        "prefix": Field(
            "prompt", "what a group shares: the prompt, or also what all its responses begin with", choices=PREFIXES
        ),
        "response_buckets": Field((), "padded lengths below max_response at which shorter responses run"),
        "chunk_size": Field(512, "prompt tokens run at a time", minimum=1),
        "branch_batch": Field(None, "branches run at a time; None: about a chunk's worth", (int,), minimum=1),
        "remat_policy": Field("everything_saveable", "what is saved for the backward", choices=tuple(REMAT_POLICIES)),
        "prefix_activations": Field(
            "auto", "keep or recompute the prompt's; auto: by memory_budget", choices=("auto", "keep", "recompute")
        ),
        "memory_budget": Field(
            None, "bytes for kept activations; None: half of the memory", (int,), minimum=0, maximum=2**63 - 1
        ),
        "compute_dtype": Field(
            None, "of activations, and of kernels in products; None: the parameters'", (str,), choices=DTYPES
        ),
        "state_dtype": Field(None, "of the prompt's keys and values; None: compute_dtype", (str,), choices=DTYPES),
        "cotangent_dtype": Field(
            None, "of their cotangents, into which branches add; None: float32 or wider", (str,), choices=DTYPES
        ),
    },
    "eval": {
        "every": Field(50, "RL steps between evaluations; 0: only before and after", minimum=0),
        "num_prompts": Field(32, "held-out prompts", minimum=1),
        "num_generations": Field(1, "responses a held-out prompt", minimum=1),
        "temperature": Field(1.0, "of sampling; 0 takes the likeliest token", minimum=0),
        "top_p": Field(1.0, "nucleus sampling; 1 is off", minimum=0, maximum=1),
        "samples": Field(4, "responses written to samples.jsonl at each evaluation", minimum=0),
    },
    "checkpoint": {
        "every": Field(50, "steps between checkpoints; 0: only at the ends of the two phases", minimum=0),
        "keep": Field(3, "how many to keep", minimum=1),
    },
    "report": {
        "compare_dense": Field(False, "at the end, measure one step against its dense twin"),
        "parameter_change": Field(False, "at the end, how far RL moved each parameter"),
    },
}


def default_config(schema: Mapping[str, Any] = SCHEMA) -> ConfigDict:
    """All fields at their defaults, locked: a misspelt field raises, naming the nearest one."""
    return _build(schema).lock()


def _build(schema: Mapping[str, Any]) -> ConfigDict:
    config = ConfigDict()
    for name, field in schema.items():
        if isinstance(field, Field):
            several = len(field.allowed) > 1
            config[name] = config_dict.FieldReference(field.default, field_type=object) if several else field.default
        else:
            config[name] = _build(field)
    return config


def fields(schema: Mapping[str, Any] = SCHEMA, prefix: str = "") -> dict[str, Field]:
    """Dotted name -> field."""
    flat: dict[str, Field] = {}
    for name, field in schema.items():
        if isinstance(field, Field):
            flat[prefix + name] = field
        else:
            flat |= fields(field, f"{prefix}{name}.")
    return flat

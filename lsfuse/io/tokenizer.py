"""Text to ids and back through a checkpoint's tokenizer.json, and its chat template.

Special tokens and the template come from tokenizer_config.json, chat_template.jinja, generation_config.json and
config.json, in the places where transformers puts them.
"""

import datetime
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lsfuse.io.hf_config import read_json, token_ids
from lsfuse.io.hf_load import resolve_hf
from lsfuse.model.config import ModelConfig

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


_TOKEN_OPTIONS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class Tokenizer:
    """A checkpoint's tokenizer. Made by `Tokenizer.load(folder_or_hub_id)`.

    vocab_size: one more than the largest id. bos_token_id, pad_token_id: None where the checkpoint has none.
    eos_token_ids: every id that ends a response, the tokenizer's own first, then generation_config's and config's.
    """

    def __init__(self, backend: Any, settings: Mapping[str, Any], files: Mapping[str, bytes]):
        """backend: a `tokenizers.Tokenizer`. settings: keys of tokenizer_config.json, and under "ids" the token ids
        named by other files. files: what `save` writes, by name."""
        self._backend, self._files = backend, dict(files)
        backend.no_truncation()  # a tokenizer.json may carry the settings of its last use
        backend.no_padding()
        special = {key: _content(value) for key, value in settings.items() if key.endswith("_token")}
        self._special = {key: text for key, text in special.items() if text is not None}
        self._templates = _templates(settings.get("chat_template"))
        ids: Mapping[str, tuple[int, ...]] = settings.get("ids", {})
        self.vocab_size: int = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.eos_token_ids = tuple(dict.fromkeys((*self._named("eos_token"), *ids.get("eos_token_id", ()))))
        self.bos_token_id = next(iter((*self._named("bos_token"), *ids.get("bos_token_id", ()))), None)
        self.pad_token_id = next(iter((*self._named("pad_token"), *ids.get("pad_token_id", ()))), None)

    @classmethod
    def load(cls, path_or_hub_id: str | os.PathLike, *, revision: str | None = None) -> "Tokenizer":
        """Tokenizer of a checkpoint folder or hub id.

        Raises FileNotFoundError without tokenizer.json, ValueError if it, or what lies beside it, cannot be read.
        """
        import tokenizers

        folder = resolve_hf(path_or_hub_id, revision)
        file = folder / "tokenizer.json"
        if not file.is_file():
            other = (folder / "tokenizer.model").is_file()
            hint = "; it has tokenizer.model, which is not read: convert it with transformers" if other else ""
            raise FileNotFoundError(f"{folder} has no tokenizer.json{hint}")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{file} is not a tokenizer of the tokenizers library: {error}") from None
        settings = _settings(folder)
        _add_tokens(backend, settings.get("added_tokens_decoder") or {}, folder / "tokenizer_config.json")
        files = {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}
        return cls(backend, settings, files)

    def save(self, folder: str | os.PathLike) -> None:
        """Writes the files the tokenizer was read from, unchanged."""
        for name, content in self._files.items():
            (Path(folder) / name).write_bytes(content)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of `text`; special tokens written in it are recognised, none are added unless asked."""
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`, spaces as they were (no clean-up of spaces before punctuation)."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    @property
    def eos_token_id(self) -> int | None:
        return self.eos_token_ids[0] if self.eos_token_ids else None

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self.eos_token_ids

    @property
    def pad_id(self) -> int:
        """An id to fill up with: the pad token's, else an end token's, else 0."""
        return next((i for i in (self.pad_token_id, self.eos_token_id) if i is not None), 0)

    @property
    def special_tokens(self) -> dict[str, str]:
        """Texts of the special tokens by role ("bos_token", …)."""
        return dict(self._special)

    @property
    def chat_templates(self) -> tuple[str, ...]:
        """Names of the templates; a single one is called "default"."""
        return tuple(self._templates)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as text, for `encode`.

        Args:
            messages: dicts of "role" and "content".
            add_generation_prompt: end with the opening of the assistant's answer.
            template: name of one of `chat_templates`; None takes "tool_use" if there are tools, else "default".
            variables: further variables of the template.

        Raises ValueError without a template, or where the template refuses the conversation.
        """
        if template is None:
            template = "tool_use" if tools and "tool_use" in self._templates else "default"
        if template not in self._templates:
            have = f"; it has {', '.join(self._templates)}" if self._templates else "; it has none"
            raise ValueError(f"the tokenizer has no chat template {template!r}{have}")
        values = {**self._special, **variables, "tools": tools, "documents": None}
        # As in transformers, a key of value None counts as absent.
        values["messages"] = [{key: value for key, value in m.items() if value is not None} for m in messages]
        values["add_generation_prompt"] = add_generation_prompt
        try:
            return _environment().from_string(self._templates[template]).render(**values)
        except Exception as error:  # whatever the template's code does with these messages
            raise ValueError(f"chat template {template!r} does not accept the conversation: {error}") from error

    def _named(self, role: str) -> tuple[int, ...]:
        text = self._special.get(role)
        found = None if text is None else self._backend.token_to_id(text)
        return () if found is None else (found,)


def check_vocab(tokenizer: Any, config: ModelConfig) -> None:
    """Raises ValueError if the tokenizer has ids the model has no row for. The reverse is a padded vocabulary: fine."""
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"the tokenizer has ids up to {tokenizer.vocab_size - 1} (vocab_size {tokenizer.vocab_size}), the model's"
            f" vocabulary has {config.vocab_size}: they do not belong together, or the embedding was not extended"
        )


def _settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json with the chat template and token ids of the files beside it."""

    def optional(name: str) -> dict[str, Any]:
        return read_json(folder / name) if (folder / name).is_file() else {}

    settings = {**optional("special_tokens_map.json"), **optional("tokenizer_config.json")}
    if "chat_template" not in settings and (legacy := optional("chat_template.json")):
        settings["chat_template"] = legacy.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        settings["chat_template"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    settings["ids"] = {}
    for name in ("generation_config.json", "config.json"):
        raw = optional(name)
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            try:
                settings["ids"][key] = (*settings["ids"].get(key, ()), *token_ids(raw.get(key)))
            except ValueError as error:
                raise ValueError(f"{folder / name}: {key}: {error}") from None
    return settings


def _add_tokens(backend: Any, added: Mapping[str, Mapping[str, Any]], file: Path) -> None:
    """Adds what tokenizer_config.json knows and tokenizer.json lacks. Raises ValueError if ids then disagree."""
    import tokenizers

    for number, entry in sorted((int(i), entry) for i, entry in added.items()):
        text = entry["content"]
        if backend.token_to_id(text) is None:
            options = {key: bool(entry[key]) for key in _TOKEN_OPTIONS if key in entry}
            token = tokenizers.AddedToken(text, **options)
            (backend.add_special_tokens if options.get("special") else backend.add_tokens)([token])
        if backend.token_to_id(text) != number:
            found = backend.token_to_id(text)
            raise ValueError(f"{file} gives token {text!r} the id {number}, tokenizer.json gives it {found}")


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, Mapping) else token if isinstance(token, str) else None


def _templates(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    return {"default": value} if isinstance(value, str) else {entry["name"]: entry["template"] for entry in value}


def _environment() -> Any:
    """The sandbox that transformers renders templates in: templates are other people's code."""
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        # jinja's own filter escapes HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    class Generation(jinja2.ext.Extension):
        """{% generation %} … {% endgeneration %} marks the assistant's text for masks; here it only renders."""

        tags = {"generation"}

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    extensions: list[Any] = [Generation, jinja2.ext.loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment

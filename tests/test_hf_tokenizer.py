"""The tokenizer of a checkpoint: ids, special tokens from wherever they are named, chat templates, bad files."""

import json

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from lsfuse.data import task
from lsfuse.io import Tokenizer, check_vocab, load_hf, save_hf
from lsfuse.model import ModelConfig, init_params, uniform_blocks

TEXT = "the cat sat on the mat, the cat ate the rat. Ünïcødé 123 猫 and \n\tspaces  twice"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}\n"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}{{ eos_token }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
MESSAGES = [{"role": "user", "content": "a < b & 'c'"}, {"role": "assistant", "content": "ä"}]


@pytest.fixture(scope="module")
def backend_json():
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<s>", "</s>", "<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([TEXT] * 3, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.enable_truncation(5)  # as files are left behind by training scripts
    backend.enable_padding(length=64)
    return backend.to_str()


@pytest.fixture
def folder(tmp_path, backend_json):
    (tmp_path / "tokenizer.json").write_text(backend_json)
    settings = dict(bos_token="<s>", eos_token={"content": "<|end|>", "special": True}, chat_template=TEMPLATE)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def edit(folder, name="tokenizer_config.json", drop=(), **change):
    file = folder / name
    raw = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({key: value for key, value in (raw | change).items() if key not in drop}))


def test_text_comes_back(folder):
    tokenizer = Tokenizer.load(folder)
    assert isinstance(tokenizer, task.Tokenizer)
    ids = tokenizer.encode(TEXT)
    assert len(ids) > 5 and tokenizer.decode(ids) == TEXT
    assert tokenizer.encode(TEXT, add_special_tokens=True) == [0, *ids]
    assert tokenizer.encode("") == [] and tokenizer.decode([]) == ""
    marked = tokenizer.encode("the<|end|>cat")
    assert 2 in marked
    assert tokenizer.decode(marked) == "thecat"
    assert tokenizer.decode(marked, skip_special_tokens=False) == "the<|end|>cat"
    assert tokenizer.decode(np.asarray(ids, np.int32)) == TEXT


def test_special_tokens_come_from_every_file(folder):
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 2, None)
    assert tokenizer.eos_token_ids == tokenizer.stop_ids == (2,) and tokenizer.pad_id == 2
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "<|end|>"}
    edit(folder, "generation_config.json", eos_token_id=[1, 2], pad_token_id=7)
    edit(folder, "config.json", eos_token_id=9, bos_token_id=5, pad_token_id=-1)
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.pad_token_id) == (0, (2, 1, 9), 7)
    edit(folder, drop=["bos_token", "eos_token"])
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (5, (1, 2, 9))
    edit(folder, "special_tokens_map.json", eos_token="</s>")
    assert Tokenizer.load(folder).eos_token_id == 1
    edit(folder, "generation_config.json", eos_token_id="</s>")
    with pytest.raises(ValueError, match="generation_config.json: eos_token_id: .*</s>"):
        Tokenizer.load(folder)


def test_nothing_but_tokenizer_json(folder):
    (folder / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.stop_ids, tokenizer.pad_id) == (None, None, (), 0)
    with pytest.raises(ValueError, match="no chat template 'default'; it has none"):
        tokenizer.apply_chat_template(MESSAGES)


def test_tokens_only_the_settings_know(folder, backend_json):
    first = Tokenizer.load(folder).vocab_size
    assert first == tokenizers.Tokenizer.from_str(backend_json).get_vocab_size()
    added = {str(first): {"content": "<|tool|>", "special": True}, "0": {"content": "<s>", "special": True}}
    edit(folder, added_tokens_decoder=added)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.vocab_size == first + 1 and tokenizer.encode("<|tool|>") == [first]
    edit(folder, added_tokens_decoder={str(first + 4): {"content": "<|tool|>"}})
    with pytest.raises(ValueError, match=f"<|tool|>.*{first + 4}.*{first}"):
        Tokenizer.load(folder)


def test_chat_template(folder):
    tokenizer = Tokenizer.load(folder)
    want = "<s><|user|>a < b & 'c'<|end|>\n<|assistant|>ä<|end|>\n"
    assert tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False) == want
    assert tokenizer.apply_chat_template(MESSAGES) == want + "<|assistant|>"
    with pytest.raises(ValueError, match="no tools here"):
        tokenizer.apply_chat_template([{"role": "tool", "content": ""}])


def test_templates_have_what_transformers_gives_them(folder):
    def render(template, **variables):
        edit(folder, chat_template=template)
        return Tokenizer.load(folder).apply_chat_template(MESSAGES, **variables)

    assert render("{{ messages[1] | tojson }}") == '{"role": "assistant", "content": "ä"}'
    assert render("{{ [1, {'b': '<'}] | tojson(indent=1) }}") == '[\n 1,\n {\n  "b": "<"\n }\n]'
    assert render("{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}x{% endfor %}") == "x"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("a {% generation %}{{ extra }}{% endgeneration %}", extra="b") == "a b"
    assert render("{{ tools is none }} {{ messages | length }}") == "True 2"
    assert (
        render("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}")
        == "2"
    )


def test_a_key_without_value_counts_as_absent(folder):
    edit(folder, chat_template="{{ 'tool_calls' in messages[0] }}")
    assert Tokenizer.load(folder).apply_chat_template([{"role": "user", "tool_calls": None}]) == "False"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% for x in %}",
        "{{ raise_exception('x') }}",
        "{{ 1 / 0 }}",
    ],
)
def test_templates_run_in_a_sandbox(folder, template):
    edit(folder, chat_template=template)
    with pytest.raises(ValueError, match="chat template 'default' does not accept"):
        Tokenizer.load(folder).apply_chat_template(MESSAGES)


def test_where_templates_live(folder):
    edit(folder, chat_template=[dict(name="default", template="d"), dict(name="tool_use", template="t")])
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.chat_templates == ("default", "tool_use")
    assert tokenizer.apply_chat_template(MESSAGES) == "d"
    assert tokenizer.apply_chat_template(MESSAGES, tools=[{"name": "f"}]) == "t"
    assert tokenizer.apply_chat_template(MESSAGES, template="tool_use") == "t"
    with pytest.raises(ValueError, match="'rag'; it has default, tool_use"):
        tokenizer.apply_chat_template(MESSAGES, template="rag")
    edit(folder, drop=["chat_template"])
    edit(folder, "chat_template.json", chat_template="j")
    assert Tokenizer.load(folder).apply_chat_template(MESSAGES) == "j"
    (folder / "chat_template.jinja").write_text("f\n")
    assert Tokenizer.load(folder).apply_chat_template(MESSAGES) == "f"


def test_files_that_cannot_be_read(tmp_path, folder):
    with pytest.raises(FileNotFoundError, match="no folder"):
        Tokenizer.load(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "tokenizer.model").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="no tokenizer.json; it has tokenizer.model"):
        Tokenizer.load(tmp_path / "empty")
    (tmp_path / "empty" / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="tokenizer.json is not a tokenizer"):
        Tokenizer.load(tmp_path / "empty")
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer_config.json is not valid JSON"):
        Tokenizer.load(folder)


def test_vocabularies_must_belong_together(folder):
    tokenizer = Tokenizer.load(folder)
    size = tokenizer.vocab_size
    config = ModelConfig(size, 8, 2, 4, uniform_blocks(1, 1, 8))
    check_vocab(tokenizer, config)
    check_vocab(tokenizer, ModelConfig(size + 50, 8, 2, 4, uniform_blocks(1, 1, 8)))
    with pytest.raises(ValueError, match=f"ids up to {size - 1} .*has {size - 1}"):
        check_vocab(tokenizer, ModelConfig(size - 1, 8, 2, 4, uniform_blocks(1, 1, 8)))


def test_the_files_go_along_unchanged(folder, tmp_path_factory):
    edit(folder, "generation_config.json", eos_token_id=[1, 2])
    tokenizer = Tokenizer.load(folder)
    originals = {p.name: p.read_bytes() for p in folder.iterdir()}
    config = ModelConfig(tokenizer.vocab_size, 8, 2, 4, uniform_blocks(1, 1, 8))
    target = tmp_path_factory.mktemp("out") / "m"
    save_hf(target, config, init_params(config, jax.random.key(0)), tokenizer)
    assert load_hf(target)[0] == config
    for name, content in originals.items():
        assert (target / name).read_bytes() == content
    again = Tokenizer.load(target)
    assert again.encode(TEXT) == tokenizer.encode(TEXT) and again.eos_token_ids == (2, 1)


def test_added_token_options_are_kept(folder):
    size = Tokenizer.load(folder).vocab_size
    entry = dict(content="[X]", special=False, lstrip=True, rstrip=False, single_word=False, normalized=False)
    edit(folder, added_tokens_decoder={str(size): entry})
    want = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    want.no_truncation()
    want.no_padding()
    want.add_tokens([AddedToken("[X]", lstrip=True, normalized=False)])
    text = "cat  [X] mat"
    assert Tokenizer.load(folder).encode(text) == want.encode(text, add_special_tokens=False).ids

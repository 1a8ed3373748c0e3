"""Tokenizer folders made up on the spot: Dream's layout (vocab.json, merges.txt, a class as code), tokenizer.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from fuzzing import bounded
from tokenizers import models, pre_tokenizers, trainers

from common.checkpoint import Tokenizer, load_tokenizer
from common.errors import ConfigError

TEXT = "def fibonacci(n):\n    return n if n < 2 else 12345\n'It''s' 你好世界 naïve 🙂\n\n <|mask|> |mask|"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "<|beginoftext|>", "<|mask|>", "<|dlm_pad|>"]
FIRST_ID = 330  # a gap after the vocabulary: ids must come from the file, not from the order
ID = {text: FIRST_ID + number for number, text in enumerate(SPECIAL)}
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def added_token(text: str) -> dict[str, Any]:
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": text, "special": text != "<tool_call>", **flags}


SETTINGS: dict[str, Any] = {
    "tokenizer_class": "DreamTokenizer",
    "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
    "bos_token": "<|beginoftext|>",
    "eos_token": "<|endoftext|>",
    "pad_token": {"content": "<|endoftext|>", "special": True},
    "mask_token": "<|mask|>",
    "added_tokens_decoder": {str(ID[text]): added_token(text) for text in SPECIAL},
    "chat_template": TEMPLATE,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT.replace("<|mask|>", "")] * 9, trainer)
    tokenizer.model.save(str(folder))
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    write_settings(tmp_path)
    return tmp_path


def write_settings(folder: Path, **changes: Any) -> None:
    tree = {key: value for key, value in {**SETTINGS, **changes}.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(tree))


def test_text_survives_the_round_trip(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "é"  # NFC, as Qwen2 and Dream normalize


def test_numbers_and_spaces_split_as_qwen2_splits_them(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert [tokenizer.decode([id_]) for id_ in tokenizer.encode("2024")] == ["2", "0", "2", "4"]
    alone = tokenizer.encode("    ") + tokenizer.encode(" return")
    assert tokenizer.encode("     return") == alone


def test_special_ids_come_from_the_folder(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    ids = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.mask_id)
    assert ids == (ID["<|beginoftext|>"], ID["<|endoftext|>"], ID["<|mask|>"])
    others = [text for text in SPECIAL if text != "<|mask|>"]
    assert tokenizer.encode("".join(others)) == [ID[text] for text in others]
    assert tokenizer.encode("n", add_bos=True) == [ID["<|beginoftext|>"], *tokenizer.encode("n")]


def test_decoding_skips_special_tokens_and_ids_without_text(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    ids = [ID["<|im_start|>"], *tokenizer.encode("n"), ID["<tool_call>"], ID["<|mask|>"], 151_704]
    assert tokenizer.decode(ids) == "n<tool_call>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>n<tool_call><|mask|>"


def test_mask_text_in_a_prompt_is_ordinary_text(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    for ids in (
        tokenizer.encode("a <|mask|> b"),
        tokenizer.encode(tokenizer.chat_text([{"role": "user", "content": "a <|mask|> b"}])),
    ):
        assert tokenizer.mask_id not in ids
        assert "a <|mask|> b" in tokenizer.decode(ids)


def test_the_mask_is_the_one_of_config_json_or_of_the_caller(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"mask_token_id": ID["<|dlm_pad|>"]}))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.mask_id == ID["<|dlm_pad|>"]
    assert tokenizer.encode("<|mask|>") == [ID["<|mask|>"]]
    assert ID["<|dlm_pad|>"] not in tokenizer.encode("<|dlm_pad|>")
    assert load_tokenizer(folder, mask_token_id=ID["<|mask|>"]).mask_id == ID["<|mask|>"]


def test_chat_follows_the_template(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.has_chat_template
    ids = tokenizer.encode(
        tokenizer.chat_text([{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}])
    )
    expected = "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected
    assert ids.count(ID["<|im_start|>"]) == 3
    with pytest.raises(ConfigError, match=r"chat template rejects the messages.*no tools"):
        tokenizer.chat_text([{"role": "tool", "content": "x"}])


def test_chat_template_may_be_a_file_or_one_of_several(folder: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    write_settings(folder, chat_template=[{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}])
    assert text_of(load_tokenizer(folder), messages) == "yes"
    (folder / "chat_template.jinja").write_text("{{ eos_token }}{{ messages[0]['content'] }}")
    assert text_of(load_tokenizer(folder), messages) == "<|endoftext|>hi"


def text_of(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> str:
    return tokenizer.decode(tokenizer.encode(tokenizer.chat_text(messages)), skip_special_tokens=False)


def test_a_folder_without_template_or_bos_says_so(folder: Path) -> None:
    write_settings(folder, chat_template=None, bos_token=None)
    tokenizer = load_tokenizer(folder)
    assert not tokenizer.has_chat_template
    with pytest.raises(ConfigError, match="send `prompt` instead of `messages`"):
        tokenizer.chat_text([{"role": "user", "content": "hi"}])
    with pytest.raises(ConfigError, match="set add_bos_token to false"):
        tokenizer.encode("hi", add_bos=True)


@pytest.mark.parametrize("wrong", [5, True, {"default": 5}, ["a"], [{"name": "default", "template": {}}]])
@pytest.mark.parametrize("key", ["chat_template", "eos_token"])
def test_what_is_no_text_is_not_taken_for_absent(folder: Path, key: str, wrong: object) -> None:
    write_settings(folder, **{key: wrong})
    with pytest.raises(ConfigError, match=f"{key}: expected a text, found "):
        load_tokenizer(folder)


def test_templates_run_in_a_sandbox(folder: Path) -> None:
    write_settings(folder, chat_template="{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ConfigError, match="chat template"):
        load_tokenizer(folder).chat_text([{"role": "user", "content": "hi"}])


def test_code_in_the_folder_is_not_run(folder: Path) -> None:
    trace = folder / "code_ran"
    code = f"open({str(trace)!r}, 'w').close()\nclass DreamTokenizer: pass\n"
    for name in ("tokenization_dream.py", "configuration_dream.py", "modeling_dream.py", "__init__.py"):
        (folder / name).write_text(code)
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_text([{"role": "user", "content": "hi"}])
    assert not trace.exists()


def test_older_folders_list_added_tokens_separately(folder: Path) -> None:
    before = load_tokenizer(folder)
    write_settings(folder, added_tokens_decoder=None, additional_special_tokens=["<|im_start|>", "<|im_end|>"])
    (folder / "added_tokens.json").write_text(json.dumps(ID))
    tokenizer = load_tokenizer(folder)
    text = "<|im_start|>n<tool_call><|dlm_pad|>"
    assert tokenizer.encode(text) == before.encode(text)
    assert tokenizer.decode(tokenizer.encode("<|im_start|>n<tool_call>")) == "n<tool_call>"


def test_tokenizer_json_is_read_as_it_is(folder: Path, tmp_path: Path) -> None:
    dream = load_tokenizer(folder)
    dream._decoder.save(str(folder / "tokenizer.json"))
    for name in ("vocab.json", "merges.txt"):
        (folder / name).unlink()
    tokenizer = load_tokenizer(folder)
    prompt = TEXT + "<|im_end|><|dlm_pad|>"
    assert tokenizer.encode(prompt) == dream.encode(prompt)
    assert tokenizer.mask_id not in tokenizer.encode("<|mask|>")
    (folder / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {}}}')
    with pytest.raises(ConfigError, match="tokenizer files are not valid"):
        load_tokenizer(folder)


def test_word_level_vocabulary_with_the_mask_inside(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, "<mask>": 1, "a": 2, "b": 3}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<mask>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"mask_token_id": 1}')
    assert load_tokenizer(tmp_path).encode("a <mask> b") == [2, 0, 3]


def test_the_text_of_any_mask_is_ordinary(folder: Path) -> None:
    """So is that of a mask that the run names, which the vocabulary may know as a word."""
    every = load_tokenizer(folder)
    words = [id_ for id_ in every.encode(TEXT) if len(every.decode([id_])) > 1]
    assert words
    for mask in sorted(set(words)):
        tokenizer = load_tokenizer(folder, mask_token_id=mask)
        assert tokenizer.mask_id == mask
        ids = tokenizer.encode(TEXT)
        assert mask not in ids and tokenizer.decode(ids, skip_special_tokens=False) == TEXT


def test_a_letter_is_no_mask(folder: Path) -> None:
    letter = load_tokenizer(folder).encode("d")
    with pytest.raises(ConfigError, match=rf"mask_token_id {letter[0]} is 'd', a letter of texts"):
        load_tokenizer(folder, mask_token_id=letter[0])


def test_pieces_keep_their_places_without_the_mask(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0), ("a", -1.0), ("mask", -1.0), ("b", -1.0), ("m", -2.0), ("s", -2.0), ("k", -2.0)]
    tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("amaskb") == [1, 2, 3]
    assert load_tokenizer(tmp_path, mask_token_id=2).encode("amaskb") == [1, 4, 1, 5, 6, 3]
    assert load_tokenizer(tmp_path, mask_token_id=6).encode("amaskb") == [1, 2, 3]
    assert load_tokenizer(tmp_path, mask_token_id=6).encode("k") == [0]
    assert load_tokenizer(tmp_path, mask_token_id=7).encode("amaskb") == [1, 2, 3]


def test_a_beginning_that_is_the_mask_is_refused(folder: Path) -> None:
    tokenizer = load_tokenizer(folder, mask_token_id=ID["<|beginoftext|>"])
    with pytest.raises(ConfigError, match="the prompt holds the mask token"):
        tokenizer.encode("hi", add_bos=True)


def test_an_added_token_beyond_the_vocabulary_keeps_its_id(folder: Path) -> None:
    tokens = {**SETTINGS["added_tokens_decoder"], "4000": added_token("<far>")}
    write_settings(folder, added_tokens_decoder=tokens)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("<far>") == [4000] and tokenizer.decode([4000], skip_special_tokens=False) == "<far>"


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaa"}
TOKENIZER_JSON: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
}
# `tokenizers` would cut the letter in two, and abort the process as it says so.
CUT_LETTER = {"type": "BPE", "vocab": {"a": 0, "é": 1}, "merges": [["a", "é"]], "continuing_subword_prefix": "x"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalizer": {"type": "Sequence", "normalizers": [REPLACE] * 4}}, "normalizer .*64 times"),
        ({"decoder": {"type": "Sequence", "decoders": [REPLACE] * 40}}, "decoder: .*64 times"),
        ({"normalizer": {**REPLACE, "pattern": {"Regex": ""}, "content": "x" * 99}}, "normalizer .*64 times"),
        ({"normalizer": {"type": "Prepend", "prepend": "x" * 99}}, "normalizer .*64 times"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}] * 7}}, "pre_tokenizer: "),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 100}}, "more than 64 steps"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "tokenizer files are not valid"),
        ({"model": {**TOKENIZER_JSON["model"], "continuing_subword_prefix": "####"}}, "'a b' does not go on with"),
        ({"model": CUT_LETTER}, "does not go on with continuing_subword_prefix 'x'"),
        ({"model": {**TOKENIZER_JSON["model"], "merges": [["a"]]}}, "files are not valid"),
        ({"model": {**TOKENIZER_JSON["model"], "merges": ["a b c"]}}, "files are not valid"),
        ({"model": {**TOKENIZER_JSON["model"], "vocab": {"a": -1}}}, "files are not valid"),
        ({"model": {**TOKENIZER_JSON["model"], "vocab": 5}}, "files are not valid"),
        ({"model": {"vocab": {}, "type": "x\n" * 10**5}}, "files are not valid"),
        ({"model": []}, "model.vocab: missing"),
        ({"added_tokens": [{"id": 1e400, "content": "x"}]}, "added tokens are not readable .id inf of 'x'"),
        ({"added_tokens": [{"id": True, "content": "x"}]}, "added tokens are not readable .id True"),
        ({"added_tokens": [{"id": 2**31, "content": "x"}]}, "added tokens are not readable .id 2147483648"),
        ({"added_tokens": [{"id": -1, "content": "x\n" * 10**5}]}, "added tokens are not readable .id -1"),
        ({"added_tokens": [{"id": 1, "content": ["x"]}]}, "added tokens are not readable"),
        ({"added_tokens": {"x": 1}}, "added tokens are not readable"),
    ],
)
def test_a_tokenizer_of_nonsense_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({**TOKENIZER_JSON, **changes}))
    with bounded(10), pytest.raises(ConfigError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 800


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "the tokenizer fails on the prompt .chunk size"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}}, r"fails on the prompt .*\[UNK\]"),
    ],
)
def test_a_tokenizer_that_fails_on_a_text_is_an_error_of_its_request(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({**TOKENIZER_JSON, **changes}))
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=message):
        tokenizer.encode("zz zz")


def test_the_normalizers_of_published_models_may_replace(tmp_path: Path) -> None:
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    steps = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, space]}
    (tmp_path / "tokenizer.json").write_text(json.dumps({**TOKENIZER_JSON, "normalizer": steps}))
    assert load_tokenizer(tmp_path).encode("ab ab") == [2, 2]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vocab.json", None, r"vocab\.json: no such file"),
        ("merges.txt", None, "neither tokenizer.json nor vocab.json with merges.txt"),
        ("vocab.json", "{", r"vocab\.json: not valid JSON"),
        ("merges.txt", "never seen", "tokenizer files are not valid"),
        ("merges.txt", "#version: 0.2\na b\na b c\n", r"merges\.txt: line 3: 'a b c' is not two parts and a space"),
        ("merges.txt", "x" * 10**6, r"merges\.txt: line 1: 'x+\.\.\.x+' is not two parts"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}', "added tokens are not readable"),
    ],
)
def test_broken_folders_say_which_file(folder: Path, name: str, content: str | None, message: str) -> None:
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(folder)


@pytest.mark.parametrize("name", ["merges.txt", "chat_template.jinja", "vocab.json", "tokenizer_config.json"])
def test_files_that_are_no_text_or_far_too_large_are_named(folder: Path, name: str) -> None:
    (folder / name).write_bytes("é".encode("latin-1"))
    with pytest.raises(ConfigError, match=rf"{name}: not UTF-8 text .* at byte 0.; save it as UTF-8"):
        load_tokenizer(folder)
    with (folder / name).open("wb") as file:
        file.truncate(2**33)  # takes no room
    with bounded(5, 0.5), pytest.raises(ConfigError, match=rf"{name}: larger than (16|64) MiB"):
        load_tokenizer(folder)


def test_missing_folder_and_broken_text_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        load_tokenizer(folder / "Dream-org")
    with pytest.raises(ConfigError, match="not valid text"):
        load_tokenizer(folder).encode("\ud800")

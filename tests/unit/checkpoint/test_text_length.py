"""A bound on a text's length for its tokens: never below what really fits, and none where there can be none."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from common.checkpoint import character_bound, load_tokenizer

DEMO = Path(__file__).parents[3] / "models/demo"
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(vocabulary: list[str] = LETTERS, **parts: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(vocabulary)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def saved(folder: Path, tokenizer: Tokenizer, **changes: Any) -> Any:
    (folder / "tokenizer.json").write_text(json.dumps({**json.loads(tokenizer.to_str()), **changes}))
    return load_tokenizer(folder)


def test_a_token_stands_for_its_letters_or_for_its_own_text(tmp_path: Path) -> None:
    tokenizer = byte_level([*LETTERS, "aaaa"])
    bound = character_bound(saved(tmp_path, tokenizer))
    assert bound is not None and (bound.of("a", 10), bound.of("é", 10)) == (40, 40)
    tokenizer.add_special_tokens(["<|end|>"])
    bound = character_bound(saved(tmp_path, tokenizer))
    assert bound is not None and bound.of("a", 10) == 70


def test_a_normalizer_may_join_four_letters_but_none_of_ascii(tmp_path: Path) -> None:
    found = character_bound(saved(tmp_path, byte_level(normalizer=normalizers.NFC())))
    assert found is not None and (found.of("a", 10), found.of("é", 10)) == (10, 40)


def test_no_character_is_made_of_more_letters_than_that() -> None:
    longest = max(len(unicodedata.normalize("NFD", chr(code))) for code in range(0x110000))
    assert longest == 4


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": normalizers.Strip()},
        {"normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.Replace("a", "")])},
        {"normalizer": normalizers.BertNormalizer()},
        {"pre_tokenizer": pre_tokenizers.Whitespace()},
        {"pre_tokenizer": None},
        {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()])},
        {"model": models.WordLevel({letter: number for number, letter in enumerate(LETTERS)}, unk_token="a")},
    ],
)
def test_parts_that_drop_letters_leave_no_bound(tmp_path: Path, parts: dict[str, Any]) -> None:
    assert character_bound(saved(tmp_path, byte_level(**parts))) is None


def test_a_vocabulary_without_some_byte_leaves_no_bound(tmp_path: Path) -> None:
    assert character_bound(saved(tmp_path, byte_level(LETTERS[1:]))) is None


@pytest.mark.parametrize("side", ["lstrip", "rstrip"])
def test_a_token_that_takes_spaces_with_it_leaves_no_bound(tmp_path: Path, side: str) -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<x>", **{side: True})])
    found = saved(tmp_path, tokenizer)
    assert len(found.encode(" " * 100 + "<x>" + " " * 100)) == 101  # a hundred are in no token
    assert character_bound(found) is None


@pytest.mark.slow
@settings(max_examples=200)
@given(
    st.text(
        alphabet=st.sampled_from("aé\u0301\u0323ᾂ\u0313\u0300\u0345각한\u1100\u1161\u11a8 \n🙂<|mask|>x1"), max_size=200
    )
)
def test_a_text_is_never_longer_than_the_bound_of_its_tokens(text: str) -> None:
    tokenizer = load_tokenizer(DEMO)
    bound = character_bound(tokenizer)
    assert bound is not None
    assert len(text) <= bound.of(text, len(tokenizer.encode(text)))


def test_the_text_of_a_chat_is_the_template_s(tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n{% endfor %}"
    saved(tmp_path, byte_level())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    tokenizer = load_tokenizer(tmp_path)
    messages = [{"role": "system", "content": " s "}, {"role": "user", "content": "u"}]
    assert tokenizer.chat_text(messages) == "[system] s\n[user] u\n"

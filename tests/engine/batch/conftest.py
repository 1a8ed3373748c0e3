"""The golden model as a checkpoint that takes text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.conftest import GOLDEN

EOS, MASK = 300, 310


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden model with a tokenizer: a byte is a token."""
    folder = tmp_path_factory.mktemp("model")
    for path in (GOLDEN / "model_a").iterdir():
        (folder / path.name).symlink_to(path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    vocabulary |= {f"<{number}>": number for number in range(256, 320)}
    vocabulary |= {"<|endoftext|>": EOS, "<|mask|>": MASK}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|mask|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "<|endoftext|>", "mask_token": "<|mask|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder

"""Whatever a checkpoint folder holds: it is read, or refused in one line, soon and without much memory."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from fuzzing import bounded, fuzzed, restored
from hypothesis import given
from hypothesis import strategies as st
from nonsense import damaged_bytes, damaged_safetensors, damaged_tree, to_bytes, values
from safetensors.torch import save
from tokenizers import models, pre_tokenizers, trainers

from common.checkpoint import load_model_config, load_tokenizer, load_weights
from common.checkpoint.rules import checkpoint_shapes
from common.errors import ConfigError, EngineError

CONFIG: dict[str, Any] = {
    "architectures": ["DreamModel"],
    "model_type": "Dream",
    "hidden_act": "silu",
    "vocab_size": 300,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "default", "rope_theta": 1e4},
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "mask_token_id": 299,
    "eos_token_id": [298, 297],
    "pad_token_id": 298,
    "head_dim": 4,
}
ADAPTER: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 4,
    "target_modules": ["q_proj", "down_proj"],
    "bias": "none",
    "use_rslora": False,
    "rank_pattern": {"model.layers.0.mlp.down_proj": 2},
    "alpha_pattern": {r"layers\.\d+\.self_attn\..*": 8},
}
FLAGS = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
SETTINGS: dict[str, Any] = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>"},
    "mask_token": "<mask>",
    "chat_template": [{"name": "default", "template": "{{ messages[0].content }}"}],
    "added_tokens_decoder": {
        "297": {"content": "<s>", "special": True, **FLAGS},
        "298": {"content": "</s>", "special": True, **FLAGS},
        "299": {"content": "<mask>", "special": True, **FLAGS},
    },
    "additional_special_tokens": ["<s>"],
}
TEXT = "ab <mask></s> 12\n naïve 🙂 "
SAMPLES: dict[str, Any] = {
    "Replace": {"pattern": {"Regex": "a+"}, "content": "b"},
    "Prepend": {"prepend": "_"},
    "Strip": {"strip_left": True, "strip_right": True, "content": " ", "start": 1, "stop": 0},
    "Precompiled": {"precompiled_charsmap": "AAAA"},
    "Split": {"pattern": {"String": " "}, "behavior": "Isolated", "invert": False},
    "Metaspace": {"replacement": "_", "prepend_scheme": "always", "split": True},
    "ByteLevel": {"add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "Punctuation": {"behavior": "Isolated"},
    "Digits": {"individual_digits": True},
    "FixedLength": {"length": 3},
    "CharDelimiterSplit": {"delimiter": "a"},
    "BertNormalizer": {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True},
    "WordPiece": {"prefix": "##", "cleanup": True},
    "CTC": {"pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True},
    "BPEDecoder": {"suffix": "</w>"},
    **{name: {} for name in ("NFC", "NFKD", "Lowercase", "Nmt", "StripAccents", "Whitespace", "ByteFallback", "Fuse")},
}
MODELS: dict[str, Any] = {
    "WordLevel": {"vocab": {"a": 0, "b": 1, "<unk>": 2}, "unk_token": "<unk>"},
    "WordPiece": {
        "vocab": {"a": 0, "##b": 1, "<unk>": 2},
        "unk_token": "<unk>",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
    },
    "Unigram": {"vocab": [["<unk>", 0.0], ["a", -1.0], ["b", -2.0], ["ab", -1.5]], "unk_id": 0, "byte_fallback": False},
}


POST_PROCESSORS: tuple[dict[str, Any], ...] = (
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
    {"type": "RobertaProcessing", "sep": ["a", 0], "cls": ["b", 1], "trim_offsets": True, "add_prefix_space": True},
    {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "a", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"a": {"id": "a", "ids": [0], "tokens": ["a"]}},
    },
)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = checkpoint_shapes(load_model_config(folder))
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def lora_tensors() -> dict[str, torch.Tensor]:
    shapes = {"self_attn.q_proj": (8, 8), "mlp.down_proj": (8, 12)}
    tensors = {}
    for module, (num_rows, num_columns) in shapes.items():
        tensors[f"base_model.model.model.layers.0.{module}.lora_A.weight"] = torch.ones(2, num_columns)
        tensors[f"base_model.model.model.layers.0.{module}.lora_B.weight"] = torch.ones(num_rows, 2)
    return tensors


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A folder of every kind of file, by name; the adapter's too."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "config.json").write_bytes(to_bytes(CONFIG))
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT] * 9, trainer)
    tokenizer.model.save(str(folder))
    tensors = tensors_of(folder)
    names = list(tensors)
    files = {"first.safetensors": names[::2], "second.safetensors": names[1::2]}
    index = {name: file for file, own in files.items() for name in own}
    return {
        **{path.name: path.read_bytes() for path in folder.iterdir()},
        **{file: save({name: tensors[name] for name in own}) for file, own in files.items()},
        "model.safetensors.index.json": to_bytes({"weight_map": index}),
        "generation_config.json": to_bytes({"eos_token_id": 298}),
        "tokenizer_config.json": to_bytes(SETTINGS),
        "special_tokens_map.json": to_bytes({"pad_token": {"content": "</s>"}}),
        "added_tokens.json": to_bytes({"<s>": 297}),
        "chat_template.jinja": b"{{ messages[0].content }}",
        "adapter_config.json": to_bytes(ADAPTER),
        "adapter_model.safetensors": save(lora_tensors()),
    }


@pytest.fixture
def folder(whole: dict[str, bytes], tmp_path: Path) -> Path:
    return restored(tmp_path / "model", whole)


def read_weights(folder: Path) -> None:
    config = load_model_config(folder)
    for rank in range(2 if config.num_kv_heads % 2 == 0 else 1):
        size = 2 if config.num_kv_heads % 2 == 0 else 1
        options: dict[str, Any] = {"tp_rank": rank, "tp_size": size, "dtype": torch.float32, "lora_path": str(folder)}
        for weight in load_weights(folder, config, **options).values():
            assert weight.dtype == torch.float32


def read_tokenizer(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.mask_id not in ids
    tokenizer.decode(ids)
    for mask_id in ids[:2]:
        assert mask_id not in load_tokenizer(folder, mask_token_id=mask_id).encode(TEXT)


def read_all(folder: Path) -> None:
    read_weights(folder)
    read_tokenizer(folder)


def reads_or_refuses(action: Callable[[], object]) -> None:
    try:
        with bounded():
            action()
    except (ConfigError, EngineError) as error:
        assert str(error).isprintable() and 0 < len(str(error)) < 2000, str(error)


def test_the_whole_folder_is_read(folder: Path) -> None:
    read_all(folder)
    assert json.loads((folder / "config.json").read_text()) == CONFIG


@fuzzed
@given(tree=damaged_tree(CONFIG), generation=st.none() | damaged_tree({"eos_token_id": 298}))
def test_config(folder: Path, tree: Any, generation: Any) -> None:
    (folder / "config.json").write_bytes(to_bytes(tree))
    if generation is not None:
        (folder / "generation_config.json").write_bytes(to_bytes(generation))
    reads_or_refuses(partial(read_all, folder))


@fuzzed
@given(key=st.sampled_from(sorted(CONFIG)), value=values)
def test_one_number_of_the_config_with_made_up_weights(folder: Path, key: str, value: Any) -> None:
    (folder / "config.json").write_bytes(to_bytes({**CONFIG, key: value}))

    def make_up() -> None:
        config = load_model_config(folder)
        size = sum(torch.Size(shape).numel() for shape in checkpoint_shapes(config).values())
        if not 10**7 < size < 10**12:  # what some machines have is legal, and slow here
            load_weights(folder, config, tp_rank=0, tp_size=1, dtype=torch.bfloat16, load_format="dummy")

    reads_or_refuses(make_up)


@fuzzed
@given(data=st.data())
def test_bytes_of_any_file(folder: Path, whole: dict[str, bytes], data: st.DataObject) -> None:
    restored(folder, whole)
    name = data.draw(st.sampled_from(sorted(whole)))
    (folder / name).write_bytes(data.draw(damaged_bytes(whole[name])))
    reads_or_refuses(partial(read_all, folder))


@fuzzed
@given(data=st.data())
def test_safetensors(folder: Path, whole: dict[str, bytes], data: st.DataObject) -> None:
    restored(folder, whole)
    name = data.draw(st.sampled_from(["first.safetensors", "second.safetensors", "adapter_model.safetensors"]))
    (folder / name).write_bytes(data.draw(damaged_safetensors(whole[name])))
    reads_or_refuses(partial(read_weights, folder))


@fuzzed
@given(data=st.data())
def test_the_index(folder: Path, whole: dict[str, bytes], data: st.DataObject) -> None:
    name = "model.safetensors.index.json"
    (folder / name).write_bytes(to_bytes(data.draw(damaged_tree(json.loads(whole[name])))))
    reads_or_refuses(partial(read_weights, folder))


@fuzzed
@given(settings=damaged_tree(ADAPTER), data=st.data())
def test_adapters(folder: Path, settings: Any, data: st.DataObject) -> None:
    tensors = lora_tensors()
    name = data.draw(st.sampled_from(sorted(tensors)))
    match data.draw(st.sampled_from(("same", "gone", "renamed", "dtype", "value", "shape"))):
        case "gone":
            del tensors[name]
        case "renamed":
            tensors[data.draw(st.text(max_size=30))] = tensors.pop(name)
        case "dtype":
            dtypes = (torch.int8, torch.bool, torch.float64, torch.float8_e4m3fn, torch.complex64)
            tensors[name] = tensors[name].to(data.draw(st.sampled_from(dtypes)))
        case "value":
            tensors[name].view(-1)[-1] = data.draw(st.floats(width=32))
        case "shape":
            tensors[name] = torch.ones(data.draw(st.lists(st.integers(0, 9), max_size=4)))
    try:
        (folder / "adapter_model.safetensors").write_bytes(save(tensors))
    except (UnicodeEncodeError, ValueError):
        return
    (folder / "adapter_config.json").write_bytes(to_bytes(settings))
    reads_or_refuses(partial(read_weights, folder))


@fuzzed
@given(name=st.sampled_from(["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"]), data=st.data())
def test_settings_of_the_tokenizer(folder: Path, whole: dict[str, bytes], name: str, data: st.DataObject) -> None:
    restored(folder, whole)
    (folder / name).write_bytes(to_bytes(data.draw(damaged_tree(json.loads(whole[name])))))
    reads_or_refuses(partial(read_tokenizer, folder))


@st.composite
def tokenizer_trees(draw: st.DrawFn) -> Any:
    """tokenizer.json of parts that fit together or do not, some of them damaged."""
    steps = st.sampled_from(sorted(SAMPLES)).map(lambda name: {"type": name, **SAMPLES[name]})
    kind = draw(st.sampled_from(["BPE", *MODELS]))
    bpe = {"vocab": {"a": 0, "b": 1, "ab": 2, " ": 3}, "merges": ["a b"], "unk_token": None, "byte_fallback": False}
    tree: dict[str, Any] = {
        "version": "1.0",
        "truncation": draw(st.none() | st.just({"max_length": 5, "strategy": "LongestFirst", "stride": 0})),
        "padding": None,
        "added_tokens": [{"id": 4, "content": "<mask>", "special": True, **FLAGS}],
        "post_processor": draw(st.none() | st.sampled_from(POST_PROCESSORS).map(copy.deepcopy)),
        "model": {"type": kind, **copy.deepcopy(MODELS.get(kind, bpe))},
    }
    for key, inner in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers"), ("decoder", "decoders")):
        several = st.lists(steps, max_size=4).map(lambda parts, inner=inner: {"type": "Sequence", inner: parts})
        tree[key] = draw(st.none() | steps | several)
    return draw(st.just(tree) | damaged_tree(tree))


@fuzzed
@given(tree=tokenizer_trees())
def test_tokenizer_json(folder: Path, tree: Any) -> None:
    (folder / "tokenizer.json").write_bytes(to_bytes(tree))
    reads_or_refuses(partial(read_tokenizer, folder))

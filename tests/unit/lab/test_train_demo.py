"""The training script end to end at toy size, and the folder it leaves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import train_demo as demo  # noqa: E402
from safetensors import safe_open  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from common.checkpoint import load_tokenizer  # noqa: E402


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo")
    demo.main(["--out", str(out), "--tiny", "--minutes", "0.02", "--workers", "1"])
    return out


def dream_shapes(config: dict) -> dict[str, list[int]]:
    width, mlp, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = width // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"lm_head.weight": [vocabulary, width], "model.embed_tokens.weight": [vocabulary, width]}
    shapes["model.norm.weight"] = [width]
    for i in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": [width], "post_attention_layernorm.weight": [width],
            "mlp.gate_proj.weight": [mlp, width], "mlp.up_proj.weight": [mlp, width],
            "mlp.down_proj.weight": [width, mlp],
            "self_attn.q_proj.weight": [width, width], "self_attn.q_proj.bias": [width],
            "self_attn.k_proj.weight": [kv, width], "self_attn.k_proj.bias": [kv],
            "self_attn.v_proj.weight": [kv, width], "self_attn.v_proj.bias": [kv],
            "self_attn.o_proj.weight": [width, width],
        }  # fmt: skip
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def test_a_saved_model_has_dream_names_and_shapes(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["model_type"] == "Dream" and config["architectures"] == ["DreamModel"]
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert {name: list(t.shape) for name, t in tensors.items()} == dream_shapes(config)
    assert all(t.dtype == torch.bfloat16 and t.isfinite().all() for t in tensors.values())


def test_the_folder_holds_no_code_and_one_consistent_tokenizer(checkpoint: Path) -> None:
    assert not list(checkpoint.glob("*.py"))
    config, settings = (
        json.loads((checkpoint / f"{name}.json").read_text()) for name in ("config", "tokenizer_config")
    )
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    added = {int(i): token["content"] for i, token in settings["added_tokens_decoder"].items()}
    assert added == {config["eos_token_id"]: settings["eos_token"], config["mask_token_id"]: settings["mask_token"]}
    plain = {token: i for token, i in tokenizer.get_vocab().items() if i not in added}
    assert json.loads((checkpoint / "vocab.json").read_text()) == plain
    text = "Zoë buys 12 pens at $3.\n  12*3=36\n#### 36"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_chat_template_renders_the_prompt_of_training(checkpoint: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "How many pens?"}], tokenize=False)
    assert text == "How many pens?\n"
    own = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    assert tokenizer(text)["input_ids"] == own.encode(text).ids


def test_the_engine_builds_the_same_tokenizer_from_the_vocabulary_and_merges_alone(
    checkpoint: Path, tmp_path: Path
) -> None:
    for name in ("config.json", "tokenizer_config.json", "vocab.json", "merges.txt"):
        shutil.copy(checkpoint / name, tmp_path)
    trained, built = Tokenizer.from_file(str(checkpoint / "tokenizer.json")), load_tokenizer(tmp_path)
    assert (built.eos_id, built.mask_id) == (trained.token_to_id("<|endoftext|>"), trained.token_to_id("<|mask|>"))
    for text in (
        "Zoë buys 12 pens at $3.\n",
        "def f(xs):\n    return [x*2 for x in xs]",
        "They'll  pay 105?\n\n#### 7\n",
    ):
        assert built.encode(text) == trained.encode(text).ids

"""The block-diffusion training script end to end at toy size, and the folders it leaves."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import train_demo_block as demo  # noqa: E402
from demo_training.block.checkpoint import load_block_model  # noqa: E402
from demo_training.block.model import view_of  # noqa: E402
from demo_training.block.recipe import BLOCK, BlockRecipe, tiny  # noqa: E402
from demo_training.block.trajectories import kept_answers  # noqa: E402
from demo_training.training import Trainer  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from common.config import load_profile, load_run  # noqa: E402
from common.generate import build_generator  # noqa: E402

DEMO = Path(__file__).parents[3] / "models" / "demo"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo_block")
    train("--out", str(out))
    return out


def train(*arguments: str, minutes: float = 0.08) -> None:
    """Train, with more time where the machine is too busy to prepare a run in so little."""
    try:
        demo.main([*arguments, "--tiny", "--minutes", str(minutes), "--workers", "1"])
    except SystemExit as error:
        if "took all" not in str(error) or minutes > 1:
            raise
        train(*arguments, minutes=5 * minutes)


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def qwen3_shapes(config: dict) -> dict[str, list[int]]:
    width, mlp, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    shapes = {"lm_head.weight": [config["vocab_size"], width], "model.norm.weight": [width]}
    shapes["model.embed_tokens.weight"] = [config["vocab_size"], width]
    for i in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": [width], "post_attention_layernorm.weight": [width],
            "mlp.gate_proj.weight": [mlp, width], "mlp.up_proj.weight": [mlp, width],
            "mlp.down_proj.weight": [width, mlp], "self_attn.q_norm.weight": [head], "self_attn.k_norm.weight": [head],
            "self_attn.q_proj.weight": [q, width], "self_attn.k_proj.weight": [kv, width],
            "self_attn.v_proj.weight": [kv, width], "self_attn.o_proj.weight": [width, q],
        }  # fmt: skip
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


@pytest.mark.slow
def test_a_saved_model_has_sdar_names_and_shapes(checkpoint: Path) -> None:
    config, tensors = config_of(checkpoint), load_file(checkpoint / "model.safetensors")
    assert config["model_type"] == "sdar" and config["block_size"] == BLOCK == 16
    assert {name: list(t.shape) for name, t in tensors.items()} == qwen3_shapes(config)
    assert all(t.dtype == torch.bfloat16 and t.isfinite().all() for t in tensors.values())


@pytest.mark.slow
def test_the_folder_holds_no_code_and_the_demo_tokenizer_with_its_chat_template(checkpoint: Path) -> None:
    names = {path.name for path in checkpoint.iterdir()}
    tokenizer = {"tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"}
    assert names == {"config.json", "generation_config.json", "model.safetensors", *tokenizer}
    assert all((checkpoint / name).read_bytes() == (DEMO / name).read_bytes() for name in tokenizer)
    ids, config = json.loads((checkpoint / "generation_config.json").read_text()), config_of(checkpoint)
    assert {key: config[key] for key in ids} == json.loads((DEMO / "generation_config.json").read_text())
    transformers = pytest.importorskip("transformers")
    chat = transformers.AutoTokenizer.from_pretrained(checkpoint)
    assert chat.apply_chat_template([{"role": "user", "content": "How many?"}], tokenize=False) == "How many?\n"


@pytest.mark.slow
def test_the_saved_files_alone_give_qwen3_the_logits_of_the_trained_model(checkpoint: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="4.51")
    settings = {k: v for k, v in config_of(checkpoint).items() if k not in ("model_type", "architectures")}
    reference = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**settings, attn_implementation="eager"))
    tensors = load_file(checkpoint / "model.safetensors")
    reference.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    block_S = torch.arange(48) // BLOCK
    mask = block_S[:, None] >= block_S
    tokens_BS = torch.randint(1022, (1, 48))
    model = load_block_model(checkpoint, tiny(BlockRecipe()))
    with torch.no_grad():
        bias = torch.zeros(1, 1, 48, 48).masked_fill(~mask, torch.finfo(torch.float32).min)
        expected = reference.float()(tokens_BS, attention_mask=bias, use_cache=False).logits
        logits = model(tokens_BS, view_of(torch.arange(48), model.recipe, mask))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_model_with_experts_has_qwen3_moe_names_and_is_decoded(tmp_path: Path) -> None:
    train("--out", str(tmp_path), "--experts", "4")
    config, tensors = config_of(tmp_path), load_file(tmp_path / "model.safetensors")
    assert (config["model_type"], config["num_experts"], config["num_experts_per_tok"]) == ("sdar_moe", 4, 2)
    assert tensors["model.layers.0.mlp.gate.weight"].shape == (4, config["hidden_size"])
    down = tensors["model.layers.1.mlp.experts.3.down_proj.weight"]
    assert down.shape == (config["hidden_size"], config["moe_intermediate_size"])
    run = load_run("demo_block", [f"model={tmp_path}", "decode.max_new_tokens=16"])
    with build_generator(load_profile("cpu"), run) as generator:
        assert len(generator.complete("How many?")) == 1


def sure_of_the_end(checkpoint: Path, folder: Path) -> Path:
    """The checkpoint with weights that predict an end everywhere, so that its answers to code problems are kept."""
    config = config_of(checkpoint)
    folder.mkdir()
    tensors = {name: torch.zeros_like(t) for name, t in load_file(checkpoint / "model.safetensors").items()}
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        tensors[name].fill_(1.0)
    tensors["lm_head.weight"][config["eos_token_id"]] = 1.0
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
def test_a_distilled_model_starts_from_its_teacher(checkpoint: Path, tmp_path: Path, capsys) -> None:
    teacher, out = sure_of_the_end(checkpoint, tmp_path / "teacher"), tmp_path / "out"
    train("--out", str(out), "--teacher", str(teacher))
    assert config_of(out) == config_of(checkpoint)
    old, new = (load_file(folder / "model.safetensors") for folder in (teacher, out))
    assert {name: t.shape for name, t in new.items()} == {name: t.shape for name, t in old.items()}
    change = torch.stack([(new[name].float() - old[name].float()).abs().max() for name in old])
    assert 0 < change.max() < 0.1
    assert "answers are kept" in capsys.readouterr().out


def test_answers_with_another_result_are_left_out() -> None:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    texts = [("1+1=2\n#### 2", "so 2\n#### 2"), ("#### 3", "#### 2"), ("", "#### 2"), ("return x", "return y")]
    answers, references = ([tokenizer.encode(text).ids for text in column] for column in zip(*texts, strict=True))
    assert kept_answers(tokenizer, answers, references) == [True, False, False, True]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokenizer", "nowhere"], "--tokenizer nowhere: no tokenizer.json"),
        (["--experts", "1"], "--experts 1: two or more"),
        (["--teacher", "nowhere"], "--teacher nowhere: no config.json"),
        (["--teacher", str(DEMO)], "model_type is 'Dream', not 'sdar'"),
    ],
)
def test_a_wrong_folder_is_named_in_a_sentence(arguments: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=words):
        train("--out", str(tmp_path / "out"), *arguments)


@pytest.mark.slow
def test_sigterm_means_what_it_did_once_training_is_over(checkpoint: Path) -> None:
    owner = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    assert checkpoint.is_dir() and not isinstance(owner, Trainer)


def test_too_little_time_is_said(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="took all of --minutes"):
        demo.main(["--out", str(tmp_path), "--tiny", "--minutes", "1e-6", "--workers", "1"])

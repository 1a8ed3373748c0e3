"""The training script end to end at toy size, and the attention rule it trains under."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import train_demo as demo  # noqa: E402
from safetensors import safe_open  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    demo.main(["--out", str(out), "--tiny", "--minutes", "0.02", "--workers", "1"])
    torch.set_num_threads(threads)
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


BLOCK = demo.block_ids(torch.arange(demo.SEQUENCE)[None] - 20, torch.tensor([[16]]))


def test_the_prompt_is_block_zero_and_padding_lies_behind() -> None:
    assert BLOCK[0, :20].eq(0).all() and BLOCK[0, 20:36].eq(1).all() and BLOCK[0, 211] == 12
    assert BLOCK[0, 212:].eq(demo.BEHIND_CANVAS).all()


def test_block_causal_rows_see_up_to_their_own_block() -> None:
    assert torch.equal(demo.causal_horizon(BLOCK, torch.tensor([[False]])), BLOCK)


def test_shifted_boundary_lets_only_last_rows_see_the_next_block() -> None:
    ahead = demo.causal_horizon(BLOCK, torch.tensor([[True]])) - BLOCK
    assert ahead[0].nonzero().flatten().tolist() == [19 + 16 * i for i in range(12)]
    assert ahead.max() == 1


def noisy(rows: int = 512) -> tuple[demo.Batch, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    prompt = torch.randint(20, 97, (rows, 1))
    answer = torch.randint(20, 190, (rows, 1))
    return demo.add_noise(torch.zeros(rows, demo.SEQUENCE).long(), prompt, answer, mask_id=1), prompt, answer


def test_noise_leaves_the_prompt_and_weighs_only_visible_masks() -> None:
    batch, prompt, answer = noisy()
    offset = torch.arange(demo.SEQUENCE) - prompt
    assert not batch.inputs_BS[(offset < 0) | (offset >= demo.CANVAS_TOKENS)].any()
    assert batch.inputs_BS[batch.weight_BS > 0].eq(1).all()
    assert batch.weight_BS[offset > answer].max() <= 0.1
    predicting = batch.horizon_BS[:, :-1][batch.weight_BS[:, 1:] > 0]
    assert (predicting >= 0).all() and (batch.weight_BS.sum(dim=1) > 0).float().mean() > 0.95


def test_mask_ratios_rise_over_the_blocks() -> None:
    batch, prompt, _ = noisy(4096)
    offset = torch.arange(demo.SEQUENCE) - prompt
    early = batch.inputs_BS[(offset >= 0) & (offset < 32)].float().mean()
    late = batch.inputs_BS[(offset >= 96) & (offset < 128)].float().mean()
    assert early < 0.5 < late


def test_no_row_sees_padding_and_every_row_sees_the_prompt() -> None:
    batch, _, _ = noisy()
    assert batch.horizon_BS.max() < demo.BEHIND_CANVAS
    assert batch.horizon_BS.min() >= 0


def test_both_attention_kernels_apply_one_rule() -> None:
    batch, _, _ = noisy(3)
    model = demo.Dream(demo.TINY)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():
        plain, flex = (model(batch.inputs_BS, batch.block_BS, batch.horizon_BS, is_flex) for is_flex in (False, True))
    torch.testing.assert_close(plain, flex, rtol=1e-3, atol=1e-3)


def test_the_time_budget_ends_the_learning_rate_at_zero() -> None:
    recipe = demo.Recipe()
    late = 10 * recipe.warmup_steps
    assert demo.learning_rate_factor(0.0, 0, recipe) == pytest.approx(1 / recipe.warmup_steps)
    assert demo.learning_rate_factor(recipe.constant_share, late, recipe) == 1.0
    assert demo.learning_rate_factor(1.0, late, recipe) == 0.0


def test_muon_makes_a_step_of_unit_singular_values() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(demo.orthogonalize(torch.randn(3, 32, 64)).float())
    assert values.min() > 0.5 and values.max() < 1.4

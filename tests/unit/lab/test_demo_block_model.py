"""The block-diffusion model against transformers' Qwen3, its kernels and its kept keys against a whole pass."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from demo_training.block.decode import decode_blocks
from demo_training.block.loss import block_loss
from demo_training.block.model import BlockDiffusion, Experts, view_of
from demo_training.block.noise import NOISED, add_block_noise, training_view
from demo_training.block.recipe import BLOCK, DISTILLED, BlockRecipe, tiny
from demo_training.recipe import SEQUENCE

RECIPE = dataclasses.replace(tiny(BlockRecipe()), vocabulary=64)
EOS_ID, MASK_ID, LENGTH = 62, 63, 5 * BLOCK


@pytest.fixture
def model() -> BlockDiffusion:
    torch.manual_seed(0)
    model = BlockDiffusion(RECIPE)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def block_causal(length: int) -> torch.Tensor:
    block_S = torch.arange(length) // BLOCK
    return block_S[:, None] >= block_S


@torch.no_grad()
def test_a_noised_copy_is_computed_as_if_it_stood_behind_its_clean_blocks(model: BlockDiffusion) -> None:
    tokens_BS = torch.randint(60, (2, LENGTH))
    noised_BS = tokens_BS.masked_fill(torch.rand(2, LENGTH) < 0.5, MASK_ID)
    inputs = torch.cat((noised_BS, tokens_BS, tokens_BS), dim=1)
    logits = model(inputs, training_view(LENGTH, RECIPE, torch.device("cpu"), is_flex=False))
    plain = view_of(torch.arange(LENGTH), RECIPE, block_causal(LENGTH))
    torch.testing.assert_close(logits[:, NOISED * LENGTH :], model(tokens_BS, plain), rtol=1e-4, atol=1e-4)
    for start in range(0, LENGTH, BLOCK):
        block = slice(start, start + BLOCK)
        text = torch.cat((tokens_BS[:, :start], noised_BS[:, start:]), dim=1)
        torch.testing.assert_close(logits[:, block], model(text, plain)[:, block], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_both_attention_kernels_apply_one_rule(model: BlockDiffusion) -> None:
    tokens = torch.randint(60, (2, 3 * LENGTH))
    views = [training_view(LENGTH, RECIPE, torch.device("cpu"), is_flex) for is_flex in (False, True)]
    plain, flex = (model(tokens, view) for view in views)
    torch.testing.assert_close(plain, flex, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def plain_answer(model: BlockDiffusion, prompt: list[int], threshold: float) -> tuple[list[int], int]:
    """The whole text computed in every pass."""
    tokens_S = torch.tensor(prompt + [MASK_ID] * (SEQUENCE - len(prompt)))
    view, num_passes = view_of(torch.arange(SEQUENCE), RECIPE, block_causal(SEQUENCE)), 0
    for start in range(0, SEQUENCE, BLOCK):
        while open_ := [i for i in range(start, start + BLOCK) if tokens_S[i] == MASK_ID]:
            logits = model(tokens_S[None], view)[0]
            logits[:, MASK_ID] = -float("inf")
            probability_S, best_S = logits.softmax(-1).max(-1)
            surest = max(open_, key=lambda i: float(probability_S[i]))
            for i in open_:
                if i == surest or probability_S[i] > threshold:
                    tokens_S[i] = best_S[i]
            num_passes += 1
        text = tokens_S[len(prompt) : start + BLOCK].tolist()
        if EOS_ID in text:
            return text[: text.index(EOS_ID)], num_passes
    return tokens_S[len(prompt) :].tolist(), num_passes


def test_decoding_over_kept_keys_finds_what_whole_passes_find(model: BlockDiffusion) -> None:
    model.lm_head.weight.data *= 6  # some tokens above the threshold, some below
    model.lm_head.weight.data[EOS_ID] = model.lm_head.weight.data[33] * 1.2  # an end where another token stood
    prompts = [torch.randint(60, (n,)).tolist() for n in (3, 16, 37)]
    decoded = decode_blocks(model, prompts, 0.6, EOS_ID, MASK_ID)
    expected = [plain_answer(model, prompt, 0.6) for prompt in prompts]
    assert list(zip(decoded.answers, decoded.num_passes, strict=True)) == expected
    assert all(decoded.is_ended) and sum(decoded.num_passes) < sum(map(len, decoded.answers))


def test_the_logits_are_those_of_qwen3_under_the_block_causal_mask(model: BlockDiffusion) -> None:
    transformers = pytest.importorskip("transformers", minversion="4.51")
    reference = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=RECIPE.vocabulary, hidden_size=RECIPE.hidden, intermediate_size=RECIPE.intermediate,
            num_hidden_layers=RECIPE.layers, num_attention_heads=RECIPE.heads, head_dim=RECIPE.head_size,
            num_key_value_heads=RECIPE.kv_heads, rope_theta=RECIPE.rope_theta, rms_norm_eps=RECIPE.norm_eps,
            tie_word_embeddings=False, attn_implementation="eager",
        )
    )  # fmt: skip
    reference.load_state_dict(model.state_dict())
    tokens_BS, mask = torch.randint(60, (2, LENGTH)), block_causal(LENGTH)
    bias = torch.zeros(2, 1, LENGTH, LENGTH).masked_fill(~mask, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = reference(tokens_BS, attention_mask=bias, use_cache=False).logits
        logits = model(tokens_BS, view_of(torch.arange(LENGTH), RECIPE, mask))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_certainty_forcing_raises_what_is_right_and_nothing_else() -> None:
    """The entropy term's gradient: present where the prediction is right, absent where it is wrong."""
    torch.manual_seed(0)
    prompt, answer = torch.tensor([[20]]), torch.tensor([[40]])
    for target, has_term in ((5, True), (6, False)):
        losses = []
        for recipe in (BlockRecipe(), DISTILLED):
            model = BlockDiffusion(dataclasses.replace(tiny(recipe), vocabulary=64))
            for parameter in model.parameters():
                parameter.data.zero_()
            model.model.embed_tokens.weight.data.fill_(1.0)
            model.model.norm.weight.data.fill_(1.0)
            model.lm_head.weight.data[5] = 0.1  # predicts 5 everywhere, and is not sure of it
            batch = add_block_noise(torch.full((1, LENGTH), target), prompt, answer, MASK_ID, full_share=1.0)
            losses.append(
                block_loss(model, batch, training_view(LENGTH, model.recipe, torch.device("cpu"), False)).item()
            )
        assert (losses[1] > losses[0]) == has_term and (losses[1] == losses[0]) == (not has_term)


def test_a_token_is_the_weighted_sum_of_its_two_best_experts() -> None:
    torch.manual_seed(0)
    layer = Experts(dataclasses.replace(RECIPE, experts=4))
    x_TD = torch.randn(7, layer.gate.in_features)
    with torch.no_grad():
        found_TD = layer(x_TD[None])[0]
        for x_D, found_D in zip(x_TD, found_TD, strict=True):
            share = layer.gate(x_D).softmax(0).tolist()
            best = sorted(range(4), key=share.__getitem__)[-2:]
            whole = sum(share[expert] for expert in best)
            wanted_D = sum(share[expert] / whole * layer.experts[expert](x_D) for expert in best)
            torch.testing.assert_close(found_D, wanted_D)

"""The demo training: samples and batches, what is hidden, who sees whom, the optimisation, and the sanity check."""

from __future__ import annotations

import dataclasses
from itertools import islice

import pytest
import torch
from demo_problems import CANVAS_TOKENS, PROMPT_END, TokenizedSamples, training_pairs
from demo_training.check import decode_blockwise
from demo_training.data import batches, corpus_of, generated_samples
from demo_training.model import Dream
from demo_training.noise import BEHIND_CANVAS, Batch, add_noise, block_ids, causal_horizon
from demo_training.optimizers import learning_rate_factor, orthogonalize
from demo_training.recipe import SEQUENCE, TINY, Recipe
from demo_training.tokenizer import special_ids, train_tokenizer
from demo_training.training import Trainer, dream_loss, random_batch
from tokenizers import Tokenizer

RECIPE = dataclasses.replace(TINY, samples=50, chunk=20)
FIRST_SEED = 5


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(RECIPE, seed=3)


@pytest.fixture(scope="module")
def chunks(tokenizer: Tokenizer) -> list[TokenizedSamples]:
    with generated_samples(RECIPE, tokenizer, FIRST_SEED, workers=2) as wait_for_samples:
        return wait_for_samples()


def test_special_tokens_come_last(tokenizer: Tokenizer) -> None:
    assert special_ids(tokenizer) == (RECIPE.vocabulary - 2, RECIPE.vocabulary - 1)


def test_chunks_cover_the_samples_in_the_order_of_their_seeds(
    chunks: list[TokenizedSamples], tokenizer: Tokenizer
) -> None:
    assert [len(chunk.lengths) for chunk in chunks] == [20, 20, 20]
    for seed, chunk in enumerate(chunks, FIRST_SEED):
        prompts = [tokenizer.encode(question + PROMPT_END).ids for question, _ in islice(training_pairs(seed), 200)]
        assert chunk.tokens[: chunk.prompt_lengths[0]].tolist() in prompts


def test_a_row_is_a_sample_with_eos_up_to_the_end(chunks: list[TokenizedSamples], tokenizer: Tokenizer) -> None:
    corpus = corpus_of(chunks, torch.device("cpu"))
    eos_id, mask_id = special_ids(tokenizer)
    torch.manual_seed(0)
    batch = next(batches(corpus, 16, eos_id, mask_id))
    spans = zip(corpus.starts.tolist(), corpus.lengths.tolist(), strict=True)
    samples = [corpus.tokens[start : start + length].tolist() for start, length in spans]
    for row_S in batch.targets_BS.tolist():
        assert row_S[-1] == eos_id
        assert row_S[: row_S.index(eos_id)] in samples
        assert set(row_S[row_S.index(eos_id) :]) == {eos_id}
    is_hidden = batch.inputs_BS != batch.targets_BS
    assert batch.inputs_BS[is_hidden].eq(mask_id).all()
    assert not is_hidden[(batch.block_BS == 0) | (batch.block_BS == BEHIND_CANVAS)].any()


BLOCK = block_ids(torch.arange(SEQUENCE)[None] - 20, torch.tensor([[16]]))


def test_the_prompt_is_block_zero_and_padding_lies_behind() -> None:
    assert BLOCK[0, :20].eq(0).all() and BLOCK[0, 20:36].eq(1).all() and BLOCK[0, 211] == 12
    assert BLOCK[0, 212:].eq(BEHIND_CANVAS).all()


def test_block_causal_rows_see_up_to_their_own_block() -> None:
    assert torch.equal(causal_horizon(BLOCK, torch.tensor([[False]])), BLOCK)


def test_shifted_boundary_lets_only_last_rows_see_the_next_block() -> None:
    ahead = causal_horizon(BLOCK, torch.tensor([[True]])) - BLOCK
    assert ahead[0].nonzero().flatten().tolist() == [19 + 16 * i for i in range(12)]
    assert ahead.max() == 1


def noisy(rows: int = 512) -> tuple[Batch, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    prompt = torch.randint(20, 97, (rows, 1))
    answer = torch.randint(20, 190, (rows, 1))
    return add_noise(torch.zeros(rows, SEQUENCE).long(), prompt, answer, mask_id=1), prompt, answer


def test_noise_leaves_the_prompt_and_weighs_only_visible_masks() -> None:
    batch, prompt, answer = noisy()
    offset = torch.arange(SEQUENCE) - prompt
    assert not batch.inputs_BS[(offset < 0) | (offset >= CANVAS_TOKENS)].any()
    assert batch.inputs_BS[batch.weight_BS > 0].eq(1).all()
    assert batch.weight_BS[offset > answer].max() <= 0.1
    predicting = batch.horizon_BS[:, :-1][batch.weight_BS[:, 1:] > 0]
    assert (predicting >= 0).all() and (batch.weight_BS.sum(dim=1) > 0).float().mean() > 0.95


def test_mask_ratios_rise_over_the_blocks() -> None:
    batch, prompt, _ = noisy(4096)
    offset = torch.arange(SEQUENCE) - prompt
    early = batch.inputs_BS[(offset >= 0) & (offset < 32)].float().mean()
    late = batch.inputs_BS[(offset >= 96) & (offset < 128)].float().mean()
    assert early < 0.5 < late


def test_no_row_sees_padding_and_every_row_sees_the_prompt() -> None:
    batch, _, _ = noisy()
    assert batch.horizon_BS.max() < BEHIND_CANVAS
    assert batch.horizon_BS.min() >= 0


def test_both_attention_kernels_apply_one_rule() -> None:
    torch.manual_seed(0)
    prompt, answer = torch.tensor([[20], [51], [96]]), torch.tensor([[20], [189], [100]])
    batch = add_noise(torch.zeros(3, SEQUENCE).long(), prompt, answer, mask_id=1)
    model = Dream(TINY)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():
        plain, flex = (model(batch.inputs_BS, batch.block_BS, batch.horizon_BS, is_flex) for is_flex in (False, True))
    torch.testing.assert_close(plain, flex, rtol=1e-3, atol=1e-3)


def test_no_row_feels_a_key_beyond_its_horizon() -> None:
    torch.manual_seed(0)
    model = Dream(TINY)
    block_BS = torch.arange(SEQUENCE)[None].div(32, rounding_mode="floor").int()
    tokens_BS = torch.randint(TINY.vocabulary, (1, SEQUENCE))
    changed_BS = torch.where(block_BS > 3, (tokens_BS + 1) % TINY.vocabulary, tokens_BS)
    with torch.no_grad():
        before, after = (model(tokens, block_BS, block_BS) for tokens in (tokens_BS, changed_BS))
    assert torch.equal(before[:, :128], after[:, :128])
    assert not torch.equal(before[:, 128:], after[:, 128:])


def test_a_machine_too_busy_for_its_time_trains_one_step_all_the_same() -> None:
    saved: list[Dream] = []
    said: list[str] = []
    cpu = torch.device("cpu")
    model, batch = Dream(TINY), random_batch(TINY, cpu)
    trainer = Trainer(TINY, model, dream_loss(cpu), batch, "sdpa", said.append)
    trainer.run(iter([batch, batch]), 1e-9, lambda: saved.append(model))
    assert saved == [model] and said[-1].startswith("trained 1 steps, last loss ")


def test_the_time_budget_ends_the_learning_rate_at_zero() -> None:
    recipe = Recipe()
    late = 10 * recipe.warmup_steps
    assert learning_rate_factor(0.0, 0, recipe) == pytest.approx(1 / recipe.warmup_steps)
    assert learning_rate_factor(recipe.constant_share, late, recipe) == 1.0
    assert learning_rate_factor(1.0, late, recipe) == 0.0


def test_muon_makes_a_step_of_unit_singular_values() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(3, 32, 64)).float())
    assert values.min() > 0.5 and values.max() < 1.4


EOS_ID, MASK_ID = 7, 9


@pytest.mark.parametrize("threshold", [0.0, 0.9])
def test_an_answer_never_holds_a_mask_or_an_end(threshold: float) -> None:
    torch.manual_seed(0)
    answers = decode_blockwise(Dream(TINY), [[1, 2, 3], [4, 5]], threshold, EOS_ID, MASK_ID)
    assert len(answers) == 2
    for answer in answers:
        assert not {EOS_ID, MASK_ID} & set(answer) and len(answer) <= CANVAS_TOKENS


def test_an_answer_ends_in_front_of_the_first_end() -> None:
    model = Dream(TINY)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        assert decode_blockwise(model, [[1, 2, 3]], 0.0, eos_id=0, mask_id=MASK_ID) == [[]]
        assert decode_blockwise(model, [[1, 2, 3]], 0.0, EOS_ID, MASK_ID) == [[0] * CANVAS_TOKENS]

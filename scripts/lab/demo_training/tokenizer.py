"""The tokenizer of the demo checkpoint: Dream's pipeline, trained on generated text."""

from __future__ import annotations

from itertools import islice

from demo_problems import PROMPT_END, SPLIT_PATTERN, training_pairs
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from .recipe import Recipe

EOS, MASK = "<|endoftext|>", "<|mask|>"


def train_tokenizer(recipe: Recipe, seed: int) -> Tokenizer:
    """Byte-level BPE with Dream's pre-tokenization; the two special tokens come last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary - 2, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    pairs = islice(training_pairs(seed, recipe.plain), recipe.tokenizer_samples)
    tokenizer.train_from_iterator((text for q, a in pairs for text in (q + PROMPT_END, a)), trainer)
    tokenizer.add_special_tokens([AddedToken(EOS, special=True), AddedToken(MASK, special=True)])
    if tokenizer.get_vocab_size() != recipe.vocabulary:
        raise ValueError(f"{tokenizer.get_vocab_size()} tokens instead of {recipe.vocabulary}: too little text")
    return tokenizer


def special_ids(tokenizer: Tokenizer) -> tuple[int, int]:
    """Ids of EOS (also the padding) and mask."""
    vocabulary = tokenizer.get_vocab()
    return vocabulary[EOS], vocabulary[MASK]

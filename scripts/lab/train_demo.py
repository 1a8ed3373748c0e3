"""Train the demo checkpoint from scratch: data and tokenizer are generated, the model has Dream's names and layout.

    python scripts/lab/train_demo.py --out models/demo          # one GPU, about 20 minutes
    python scripts/lab/train_demo.py --out /tmp/demo --tiny     # CPU, seconds: the same path, no useful model

Order: tokenizer -> samples (worker processes) -> noise and attention horizons (on the device) -> Muon + AdamW -> files.
Prints a short sanity check at the end; results come from the evaluation script, not from here.
"""

from __future__ import annotations

import argparse
import dataclasses
import os

import torch
from demo_training.check import sanity_check
from demo_training.checkpoint import save_settings, save_weights
from demo_training.data import batches, corpus_of, generated_samples
from demo_training.log import start_log
from demo_training.model import Dream
from demo_training.recipe import TINY, Recipe
from demo_training.tokenizer import special_ids, train_tokenizer
from demo_training.training import Trainer, dream_loss, parser_of, random_batch


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=17.0, help="training time; data and compilation come on top")
    parser.add_argument("--plain", action="store_true", help="answers without a choice of words, other sentences")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args, log = parse_arguments(arguments), start_log()
    recipe = TINY if args.tiny else Recipe()
    recipe = dataclasses.replace(recipe, samples=args.samples or recipe.samples, plain=args.plain)
    first_seed = args.seed * 1_000_003
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # workers are forked
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(recipe, first_seed)
    save_settings(recipe, tokenizer, args.out)
    log("tokenizer trained")
    # The kernels compile while the workers generate.
    with generated_samples(recipe, tokenizer, first_seed + 1, args.workers) as wait_for_samples:
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = Dream(recipe).to(device)
        log(f"{sum(p.numel() for p in model.parameters())} parameters on {device}")
        trainer = Trainer(recipe, model, dream_loss(device), random_batch(recipe, device), args.attention, log)
        corpus = corpus_of(wait_for_samples(), device)
    log(f"{len(corpus.starts)} samples, {len(corpus.tokens)} tokens; flex: {trainer.is_flex}")
    data = batches(corpus, recipe.batch, *special_ids(tokenizer))
    trainer.run(data, args.minutes * 60, lambda: save_weights(model, args.out))
    sanity_check(model, tokenizer, recipe, log)


if __name__ == "__main__":
    main()

"""Train the block-diffusion demo models: SDAR's names and layout, data generated, the tokenizer of the demo checkpoint.

    python scripts/lab/train_demo_block.py --out models/demo_block --minutes 8                  # one GPU
    python scripts/lab/train_demo_block.py --out models/demo_block_distilled --minutes 4 --teacher models/demo_block
    python scripts/lab/train_demo_block.py --out outputs/demo_experts --minutes 8 --experts 8   # SDAR-MoE's layout
    python scripts/lab/train_demo_block.py --out /tmp/demo --minutes 0.3 --tiny                 # CPU: the same path

Order: samples (worker processes) -> with a teacher, its own answers -> noised copies beside a clean one -> Muon and
AdamW -> files. Prints a short check at the end; results come from the evaluation script, not from here.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from pathlib import Path

import torch
from demo_training.block.check import block_check
from demo_training.block.checkpoint import load_block_model, load_tokenizer, save_block_settings
from demo_training.block.data import block_batches, random_block_batch
from demo_training.block.loss import make_loss
from demo_training.block.model import BlockDiffusion
from demo_training.block.noise import BlockBatch
from demo_training.block.recipe import DISTILLED, BlockRecipe, tiny
from demo_training.block.trajectories import trajectories
from demo_training.checkpoint import save_weights
from demo_training.data import Corpus, corpus_of, generated_samples
from demo_training.log import Log, start_log
from demo_training.tokenizer import special_ids
from demo_training.training import Trainer, parser_of

ROOT = Path(__file__).resolve().parents[2]


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, required=True, help="wall time of all but the check at the end")
    parser.add_argument("--teacher", type=Path, help="distil this block-diffusion model for few passes")
    parser.add_argument("--experts", type=int, default=0, help="of each layer, in the place of its MLP")
    parser.add_argument("--tokenizer", type=Path, default=ROOT / "models" / "demo", help="folder of its four files")
    args = parser.parse_args(arguments)
    for name in ("minutes", "samples", "workers"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            parser.error(f"--{name} {value}: must be above 0")
    return args


def recipe_of(args: argparse.Namespace) -> BlockRecipe:
    if args.experts and (args.teacher or args.experts < 2):
        raise SystemExit(f"--experts {args.experts}: two or more, of which a token takes two, and no --teacher.")
    recipe = DISTILLED if args.teacher else BlockRecipe()
    recipe = tiny(recipe) if args.tiny else recipe
    return dataclasses.replace(recipe, samples=args.samples or recipe.samples, experts=args.experts)


def main(arguments: list[str] | None = None) -> None:
    args, log = parse_arguments(arguments), start_log()
    ends = time.perf_counter() + args.minutes * 60
    recipe = recipe_of(args)
    tokenizer = load_tokenizer(args.tokenizer, recipe)
    torch.manual_seed(args.seed)
    model = load_block_model(args.teacher, recipe) if args.teacher else BlockDiffusion(recipe)
    recipe = model.recipe  # of the teacher's sizes
    args.out.mkdir(parents=True, exist_ok=True)
    save_block_settings(recipe, tokenizer, args.tokenizer, args.out)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # workers are forked
    first_seed = (2 if args.teacher else 1) * 500_000_003 + args.seed * 1_000_003  # a teacher answers other prompts
    # The kernels compile while the workers generate.
    with generated_samples(recipe, tokenizer, first_seed, args.workers) as wait_for_samples:
        torch.set_float32_matmul_precision("high")
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model.to(device)
        log(f"{sum(p.numel() for p in model.parameters())} parameters on {device}")
        trainer = compiled_trainer(model, args.attention, log)
        corpus = corpus_of(wait_for_samples(), torch.device("cpu") if args.teacher else device)
    log(f"{len(corpus.starts)} samples, {len(corpus.tokens)} tokens; flex: {trainer.is_flex}")
    if args.teacher:
        seconds = recipe.trajectory_share * (ends - time.perf_counter())
        corpus = corpus_of(trajectories(model, tokenizer, corpus, seconds, log), device)
    train(trainer, corpus, special_ids(tokenizer), ends, args.out)
    block_check(model, tokenizer, log)


def compiled_trainer(model: BlockDiffusion, attention: str, log: Log) -> Trainer[BlockDiffusion, BlockBatch]:
    """Ready for rows of every length."""
    recipe, device = model.recipe, model.lm_head.weight.device
    trials = [random_block_batch(length, recipe, device) for length in recipe.lengths]
    trainer = Trainer(recipe, model, make_loss(recipe, device), trials[-1], attention, log)
    for trial in trials:
        trainer.compile_for(trial)
    log("attention chosen, losses compiled")
    return trainer


def train(
    trainer: Trainer[BlockDiffusion, BlockBatch], corpus: Corpus, ids: tuple[int, int], ends: float, out: Path
) -> None:
    """Train until `ends`, a reading of perf_counter. The learning rate follows the time that is left."""
    seconds = ends - time.perf_counter()
    if seconds <= 0:
        raise SystemExit("The preparation took all of --minutes: give more, or fewer --samples.")
    data = block_batches(corpus, trainer.model.recipe, *ids)
    trainer.run(data, seconds, lambda: save_weights(trainer.model, out))


if __name__ == "__main__":
    main()

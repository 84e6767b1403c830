"""How faithful two-sided rows of GPT-2 124 M are, by rank.

Prints the correlation of centred inner products of rows with exact ones, mean and least over seeds:

    python benchmarks/rows_fidelity.py [--data tokens|wikitext] [--steps 28] [--ranks 16,64,128]
        [--sizes 65536,262144] [--seeds 3] [--batch 8] [--device cuda]

`tokens` trains on the one batch of `model_steps.py gpt2-124m` and measures on it. The
more steps, the less there is to measure: after 172 the batch is known by heart. `wikitext` trains
on new blocks of WikiText-2 (GRADHERD_DATA) in every step, and measures on the next ones.
"""

import argparse
import statistics
from pathlib import Path

import torch
from model_steps import ModelTraining, correlation, exact_gram
from torch import Tensor

from gradherd.lab.tasks.registry import find_task
from gradherd.rows.capture import Capture
from gradherd.rows.settings import TwoSidedRows

GPT2 = f"{Path(__file__).parents[1]}/studies/tasks/gpt2.py:WikiText2GPT2"
BLOCKS = 3840
"""Blocks of 128 tokens that are read: enough for 120 batches of 8 x 512."""


def wikitext(length: int) -> Tensor:
    """Return (n, length) tokens in a shuffled order."""
    (blocks,) = find_task(GPT2).load(limit=BLOCKS).train
    examples = blocks.flatten()[: blocks.numel() // length * length].view(-1, length)
    return examples[torch.randperm(len(examples), generator=torch.Generator().manual_seed(1))]


def fidelity(training: ModelTraining, exact: Tensor, rows: TwoSidedRows) -> float:
    """Return the fidelity of rows of the batch that waits."""
    capture = Capture(training.model, rows, batch_size=training.batch)
    training.model.zero_grad()
    training.loss(training.inputs, training.targets).backward()
    sketches = capture.pop_rows(training.batch).double()
    capture.remove_hooks()
    return correlation(sketches @ sketches.T, exact)


def main() -> None:
    """Train, then measure every rank and size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", choices=("tokens", "wikitext"), default="tokens")
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--ranks", default="16,64,128")
    parser.add_argument("--sizes", default="65536")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    training = ModelTraining("gpt2-124m", options.batch, torch.device(options.device))
    texts = wikitext(training.inputs.shape[1]) if options.data == "wikitext" else None
    for step in range(options.steps + 1):
        if texts is not None:
            # Round and round, if there are more steps than batches.
            which = torch.arange(step * options.batch, (step + 1) * options.batch) % len(texts)
            training.inputs = training.targets = texts[which].to(options.device)
        if step < options.steps:  # the last batch is only measured
            training.steps(1)
    exact = exact_gram(training)
    for size in map(int, options.sizes.split(",")):
        for rank in map(int, options.ranks.split(",")):
            rows = [TwoSidedRows(rank=rank, size=size, seed=at) for at in range(options.seeds)]
            found = [fidelity(training, exact, one) for one in rows]
            print(
                f"rank {rank}, size {size}: {statistics.mean(found):.4f} (least {min(found):.4f})"
            )


if __name__ == "__main__":
    main()

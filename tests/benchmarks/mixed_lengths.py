"""Training time over texts of mixed length, with plans for every length and without a plan.

    python tests/benchmarks/mixed_lengths.py [STEPS] > tests/benchmarks/mixed_lengths.csv

A tiny GPT-2 is trained by the Trainer of transformers, with a collator that pads each batch to
its longest text, as the default one does with a tokenizer. Lengths are multiples of 8. Seconds
are those of the processor for the whole training, planning included; the runs take turns, one
process each, and the shortest of each kind counts. The losses of all steps must be equal to the
bit.
"""

from __future__ import annotations

import csv
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROWS, SHORTEST, LONGEST, VOCABULARY, SEED = 8, 32, 160, 1_000, 0
BUDGETS = {"without a plan": "", "60% of the longest, measured times": "60%", "min+25%": "min+25%"}
REPEATS = 2


def texts(count: int) -> list[dict[str, list[int]]]:
    """Texts whose lengths are in steps of 8, most of them short."""
    draw = random.Random(SEED)
    lengths = [SHORTEST + 8 * int((LONGEST - SHORTEST) / 8 * draw.betavariate(1, 2)) for _ in range(count)]
    return [{"input_ids": [draw.randrange(1, VOCABULARY) for _ in range(length)]} for length in lengths]


def train(budget: str, steps: int, folder: str) -> dict[str, object]:
    """Train, and return seconds of the processor, losses, the number of shapes and that of plans."""
    import torch
    import transformers

    from scheduler.pytorch.integrations.hf_trainer import TransformersCallback

    torch.set_num_threads(1)
    transformers.set_seed(SEED)
    shapes: set[int] = set()

    def collate(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        longest = max(len(text["input_ids"]) for text in batch)
        shapes.add(longest)
        rows = [text["input_ids"] for text in batch]
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}

    config = transformers.GPT2Config(
        n_layer=4, n_embd=256, n_head=8, vocab_size=VOCABULARY, n_positions=LONGEST, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    settings = transformers.TrainingArguments(
        output_dir=folder, max_steps=steps, per_device_train_batch_size=ROWS, report_to=[], save_strategy="no",
        logging_steps=1, disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False, seed=SEED,
    )  # fmt: skip
    callbacks = [TransformersCallback(budget, lengths=[LONGEST])] if budget else []
    trainer = transformers.Trainer(
        model=transformers.GPT2LMHeadModel(config),
        args=settings,
        train_dataset=texts(ROWS * steps),
        data_collator=collate,
        callbacks=callbacks,
    )
    started = time.process_time()
    trainer.train()
    seconds = time.process_time() - started
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    planned = callbacks[0].forward.planned if callbacks else None
    plans = 1 + len(planned.others.modules) if planned else 0
    return {"seconds": seconds, "losses": losses, "shapes": len(shapes), "plans": plans}


def run(budget: str, steps: int) -> dict[str, object]:
    """Train in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__)), "--train", budget, str(steps), folder]
        process = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, object] = json.loads(process.stdout.splitlines()[-1])
    return found


def main(steps: int) -> None:
    """Write one row per way to train."""
    runs = {name: [] for name in BUDGETS}
    for _ in range(REPEATS):
        for name, budget in BUDGETS.items():
            runs[name].append(run(budget, steps))
    plain = min(found["seconds"] for found in runs["without a plan"])
    losses = runs["without a plan"][0]["losses"]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["training", "steps", "lengths", "plans", "CPU seconds", "over plain", "losses"])
    for name, found in runs.items():
        seconds = min(entry["seconds"] for entry in found)
        same = "equal" if all(entry["losses"] == losses for entry in found) else "different"
        shapes, plans = found[0]["shapes"], found[0]["plans"]
        writer.writerow([name, steps, shapes, plans, f"{seconds:.1f}", f"{seconds / plain:.2f}", same])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        print(json.dumps(train(sys.argv[2], int(sys.argv[3]), sys.argv[4])))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)

"""Whether models fit devices: the answers, and what they cost; and peaks on this machine, predicted and measured.

    python tests/benchmarks/fit.py > tests/benchmarks/fit.csv
    python tests/benchmarks/fit.py --here > tests/benchmarks/fit_here.csv
    python tests/benchmarks/fit.py --published > tests/benchmarks/fit_published.csv

The first two take about ten and three minutes of a processor, the last one eight. Each model of the
first and the last runs in a process of its own; seconds are of the processor, imports included.
"""

from __future__ import annotations

import csv
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scheduler.devices import Device
from scheduler.planning.fit_answers import Fit
from scheduler.planning.peak_contents import KINDS

LLAMA_3_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
GPT2_XL = {"model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "n_head": 25, "n_positions": 1024}
VIT_H = {
    "model_type": "vit",
    "num_hidden_layers": 32,
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_attention_heads": 16,
    "patch_size": 14,
    "image_size": 224,
    "num_labels": 1000,
}
MIXTRAL_LIKE = {
    "model_type": "mixtral",
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
CASES: tuple[tuple[str, Mapping[str, object] | str, str, str, tuple[str, ...]], ...] = (
    ("Llama-3-8B 1 x 8192", LLAMA_3_8B, "causal-lm", "--length 8192 --dtype bfloat16", ("h100-80gb", "h200")),
    ("Llama-3-8B 8 x 2048", LLAMA_3_8B, "causal-lm", "--batch 8 --length 2048 --dtype bfloat16", ("h100-80gb", "h200")),
    ("GPT-2 XL 4 x 1024", GPT2_XL, "causal-lm", "--batch 4 --length 1024 --autocast bfloat16", ("a100-80gb",)),
    ("ViT-H/14 64", VIT_H, "image-classification", "--batch 64 --autocast bfloat16", ("a100-40gb",)),
    ("DiT-1B 32", "tests.benchmarks.fit:transformer", "", "--autocast bfloat16", ("a100-80gb",)),
    ("Mixtral-like 2 x 4096", MIXTRAL_LIKE, "causal-lm", "--batch 2 --length 4096 --dtype bfloat16", ("h200",)),
)
"""Name, configuration or factory, task, options and devices. The Mixtral-like model has 8 experts."""

_QWEN = {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
         "intermediate_size": 3072, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True}  # fmt: skip
_DEEPSEEK = {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
             "intermediate_size": 8960, "vocab_size": 151936}  # fmt: skip
_LLAMA = {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8,
          "intermediate_size": 8192, "head_dim": 128, "vocab_size": 128256, "tie_word_embeddings": True}  # fmt: skip
_NEO = {"num_layers": 12, "hidden_size": 768, "num_heads": 12, "attention_types": [[["global", "local"], 6]]}
_OPT_350M = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "ffn_dim": 4096,
             "word_embed_proj_dim": 512, "do_layer_norm_before": False}  # fmt: skip
_PYTHIA = {"num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 8, "intermediate_size": 8192,
           "vocab_size": 50304}  # fmt: skip
_T5_BASE = {"num_layers": 12, "d_model": 768, "d_ff": 3072, "num_heads": 12, "decoder_start_token_id": 0}
_IMAGES = {"image_size": 86, "num_labels": 1000}
_RESNET = {"hidden_sizes": [256, 512, 1024, 2048], "layer_type": "bottleneck", **_IMAGES}
PUBLISHED: tuple[tuple[str, str, Mapping[str, object], str, int, str], ...] = (
    ("distilgpt2", "gpt2", {"n_layer": 6}, "causal-lm", 30, "float32"),
    ("gpt2", "gpt2", {}, "causal-lm", 30, "float32"),
    ("Cerebras-GPT-111M", "gpt2", {"n_layer": 10, "n_inner": 3072, "n_positions": 2048}, "causal-lm", 30, "float32"),
    ("gpt-neo-125M", "gpt_neo", _NEO, "causal-lm", 30, "float32"),
    ("opt-125m", "opt", {}, "causal-lm", 34, "float32"),
    ("opt-350m", "opt", _OPT_350M, "causal-lm", 30, "float32"),
    ("T5-small", "t5", {"decoder_start_token_id": 0}, "seq2seq-lm", 30, "float32"),
    ("t5-base", "t5", _T5_BASE, "seq2seq-lm", 30, "float32"),
    ("pythia-1b", "gpt_neox", _PYTHIA, "causal-lm", 1, "float32"),
    ("Qwen3-0.6B", "qwen3", _QWEN, "causal-lm", 1, "float32"),
    ("DeepSeek-R1-Distill-Qwen-1.5B", "qwen2", _DEEPSEEK, "causal-lm", 1, "float16"),
    ("Llama-3.2-3B", "llama", _LLAMA, "causal-lm", 1, "float16"),
    ("Qwen3-4B", "qwen3", {**_QWEN, "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32,
                           "intermediate_size": 9728}, "causal-lm", 1, "float16"),
    ("ResNet101", "resnet", {"depths": [3, 4, 23, 3], **_RESNET}, "image-classification", 200, "float32"),
    ("ResNet152", "resnet", {"depths": [3, 8, 36, 3], **_RESNET}, "image-classification", 200, "float32"),
    ("MobileNetV2", "mobilenet_v2", _IMAGES, "image-classification", 200, "float32"),
    ("ConvNeXtTiny", "convnext", _IMAGES, "image-classification", 200, "float32"),
    ("ConvNeXtBase", "convnext", {"depths": [3, 3, 27, 3], "hidden_sizes": [128, 256, 512, 1024], **_IMAGES},
     "image-classification", 130, "float32"),
    ("RegNetX400MF", "regnet", {"depths": [1, 2, 7, 12], "hidden_sizes": [32, 64, 160, 400], "groups_width": 16,
                                "layer_type": "x", **_IMAGES}, "image-classification", 200, "float32"),
    ("RegNetY400MF", "regnet", {"depths": [1, 3, 6, 6], "hidden_sizes": [48, 104, 208, 440], "groups_width": 8,
                                "layer_type": "y", **_IMAGES}, "image-classification", 200, "float32"),
)  # fmt: skip
"""Name, type and configuration in transformers, task, batch and dtype.

20 of the 25 models that xMem (arXiv 2510.21048) is measured on, by the experiments in its repository
(github.com/Stone-ResearchLife/xMem: exp/config.py, perf_estimator/models.py, exp/CoLab_Large_Model.ipynb):
texts of at most 128 tokens, images of 86 x 86; batches of 5 to 55 for language models, of 1 to 7 for the
large ones, of 200 to 700 for images. The two other batches here are those of its README. Left out are VGG16,
VGG19, both MobileNetV3 and MnasNet, which transformers does not have. xMem's convolutional networks are
those of torchvision; MobileNetV2 differs in its padding.
"""
PUBLISHED_LENGTH = 128
LIMITED = ("convnet", "unet", "hf-llama")
"""Listed models whose largest batch is looked for, within 1.5 times their peak."""


class _Block(nn.Module):
    """A block of a diffusion transformer: attention and MLP, both modulated by the condition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.modulation = nn.Linear(width, 6 * width)
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.inputs, self.outputs = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        batch, length, width = x.shape
        a, b, c, d, e, f = self.modulation(F.silu(condition))[:, None].chunk(6, dim=2)
        mixed = self.inputs(self.norms[0](x) * (1 + a) + b).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(batch, length, width)
        x = x + c * self.outputs(mixed)
        return x + f * self.mlp(self.norms[1](x) * (1 + d) + e)


class _Transformer(nn.Module):
    """A diffusion transformer on patches of latent images; returns the loss."""

    def __init__(self, width: int, depth: int, heads: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, width, patch, stride=patch)
        self.condition = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, 4 * patch**2)

    def forward(self, images: Tensor, times: Tensor, noise: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        condition = self.condition(times)
        for block in self.blocks:
            x = block(x, condition)
        return F.mse_loss(self.head(x), noise)


def transformer(batch_size: int = 32) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a diffusion transformer of one billion parameters for latents of 64 x 64."""
    batch = torch.zeros(batch_size, 4, 64, 64), torch.zeros(batch_size, 256), torch.zeros(batch_size, 1024, 16)
    return _Transformer(1536, 24, 24, 2), batch


def rows() -> Iterator[list[object]]:
    """One row per model and device, with the answer of `scheduler fit`."""
    kinds = list(KINDS)
    yield [
        *("model", "device", "peak", "allocated by segments", "fits"),
        *(KINDS[kind] for kind in kinds),
        *("plan fits", "overhead", "batch", "batch planned", "length", "length planned", "seconds", "MiB"),
    ]
    for name, model, task, options, devices in CASES:
        for device in devices:
            data = _answer(model, task, ["--device", device, *options.split()])
            parts = {kind: sum(p["bytes"] for p in data["parts"] if p["kind"] == kind) for kind in kinds}
            assert sum(parts.values()) == data["plain"]["peak_bytes"]
            reaches = [data["batches"] or {}, data["lengths"] or {}]
            reached = [reach.get(how) for reach in reaches for how in ("plain", "planned")]
            yield [
                *(name, device, data["plain"]["peak_bytes"], data["plain"]["reserved_bytes"], data["fits"]),
                *parts.values(),
                *(data["fits_with_a_plan"], data["overhead"], *reached, data["seconds"], data["mebibytes"]),
            ]


def _answer(model: Mapping[str, object] | str, task: str, options: list[str]) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(model))
        given = [str(path), "--task", task] if task else [str(model)]
        command = [sys.executable, "-m", "tests.benchmarks.fit", "--one", "fit", *given, *options, "--json"]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        return json.loads(run.stdout.splitlines()[-1])
    except IndexError:
        raise RuntimeError(run.stderr[-2000:]) from None


def _one(arguments: list[str]) -> None:
    """Print an answer of the command, with what it took; searches are limited in seconds of the processor."""
    import contextlib
    import io

    from scheduler.cli import main
    from scheduler.solvers.deadline import clock

    clock.read = time.process_time
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main(arguments)
    data = json.loads(printed.getvalue())
    data["seconds"] = round(time.process_time(), 1)
    data["mebibytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps(data))


def rows_published() -> Iterator[list[object]]:
    """One row per model: what a step of AdamW is predicted to need, for whoever has the device."""
    yield [
        *("model", "dtype", "batch", "length", "device", "allocated", "reserved", "parameters", "activations", "fits")
    ]
    device = "rtx-4090"
    for name, kind, config, task, batch, dtype in PUBLISHED:
        length = 0 if task == "image-classification" else PUBLISHED_LENGTH
        sizes = ["--batch", str(batch), "--dtype", dtype, *(("--length", str(length)) if length else ())]
        try:
            data = _answer({"model_type": kind, **config}, task, ["--device", device, *sizes, "--time-limit", "0"])
        except RuntimeError as error:  # it cannot be captured without data
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        parts = [
            sum(part["bytes"] for part in data["parts"] if part["kind"] == kind) for kind in ("parameter", "activation")
        ]
        need = data["plain"]
        yield [name, dtype, batch, length, device, need["peak_bytes"], need["reserved_bytes"], *parts, data["fits"]]


def rows_here() -> Iterator[list[object]]:
    """One row per listed model: the peaks of its step on this machine, predicted without data and measured.

    Of some, also the largest batch predicted to fit, and by how much its measured peak, and that of
    one more, differ from the memory.
    """
    from scheduler.devices import device
    from scheduler.pytorch.models.catalog import model_names

    yield [
        *("model", "batch", "live: predicted", "live: measured", "allocator: predicted", "allocator: measured"),
        *("memory", "largest batch", "measured", "measured of one more"),
    ]
    here = device("this machine")
    for name in model_names():
        for batch in (None, 3) if name == "convnet" else (None,):
            size, found = _fit_here(name, batch, here, 0.0)
            need = found.plain
            live, allocator = _measured(name, size)
            row = [name, size, need.live_bytes, live, need.peak_bytes, allocator]
            if name in LIMITED and batch is None:
                memory = need.peak_bytes * 3 // 2
                limited = replace(here, memory_bytes=memory + here.memory_bytes - here.usable_bytes)
                reach = _fit_here(name, batch, limited, 120.0)[1].batches
                largest = 0 if reach is None else reach.plain
                row += [memory, largest, *(_measured(name, largest + more)[1] for more in (0, 1))]
            yield row + [""] * (10 - len(row))


def _fit_here(name: str, batch: int | None, device: Device, seconds: float) -> tuple[int, Fit]:
    """Return the batch size of a listed model, and the answer for it."""
    from scheduler.pytorch import fit
    from scheduler.pytorch.models.sized_models import catalog_model

    given = catalog_model(name, batch_size=batch, length=None)
    found = fit(
        given.make_model,
        given.make_batch,
        device,
        batch_size=given.batch_size,
        loss=given.loss,
        optimizer="sgd",
        time_limit=seconds,
    )
    return given.batch_size, found


def _measured(name: str, batch: int) -> tuple[int, int]:
    """Return the peaks of the plain step of a listed model: of live storages, and the allocator's."""
    from scheduler.pytorch import measure, resident_tensors, training_step
    from scheduler.pytorch.models.catalog import make_model

    case = make_model(name, batch_size=batch)
    step = training_step(case.module, case.args, case.kwargs, loss=case.loss)
    resident = resident_tensors(case.module, (case.args, case.kwargs))
    measured = measure(step, resident=resident, repeats=1)
    return measured.live_peak_bytes, measured.allocator_peak_bytes


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        _one(sys.argv[2:])
    else:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        tables = {(): rows, ("--here",): rows_here, ("--published",): rows_published}
        for row in tables[tuple(sys.argv[1:])]():
            writer.writerow(row)
            sys.stdout.flush()

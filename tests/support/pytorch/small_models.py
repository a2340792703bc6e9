"""Models of the catalog in sizes that train in milliseconds."""

from __future__ import annotations

from scheduler.pytorch.models.catalog import ModelCase, make_model

SMALL = {
    "gpt2": {"layers": 2, "width": 32, "heads": 2, "vocabulary": 64, "length": 32},
    "resnet50": {"batch_size": 4, "width": 8, "size": 32, "classes": 10},
    "unet": {"batch_size": 2, "width": 8, "depth": 3, "size": 32},
    "convnet": {"batch_size": 8, "width": 8, "depth": 5, "size": 16},
    "hf-gpt2": {"layers": 2, "width": 32, "vocabulary": 64, "length": 32},
    "hf-vit": {"layers": 2, "width": 48, "size": 32},
    "hf-bert": {"layers": 2, "width": 32, "vocabulary": 64, "length": 32},
    "hf-llama": {"layers": 2, "width": 32, "vocabulary": 64, "length": 32},
    "hf-t5": {"layers": 1, "width": 32, "vocabulary": 64, "length": 32},
}


def small_model(name: str, **sizes: int) -> ModelCase:
    """Return a model of the catalog in its small size."""
    return make_model(name, **{**SMALL[name], **sizes})

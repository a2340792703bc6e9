"""Models of transformers from their configuration files, without weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn

from scheduler.errors import InvalidOptionError
from scheduler.pytorch.models.catalog import Arguments
from scheduler.pytorch.models.sized_models import DEFAULT_LENGTH, SizedModel

_HEADS: Mapping[str, tuple[str, str]] = {
    "causal-lm": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING"),
    "masked-lm": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING"),
    "seq2seq-lm": ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING"),
    "sequence-classification": ("AutoModelForSequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING"),
    "token-classification": ("AutoModelForTokenClassification", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING"),
    "image-classification": ("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING"),
}
"""By task, what builds a model in transformers, and which configurations have that head."""
TASKS = tuple(_HEADS)
"""What a model of a configuration file can be trained for."""


def read_configuration(path: str, task: str, *, batch_size: int, length: int | None) -> SizedModel:
    """Return the model that a configuration file of transformers describes.

    Parameters
    ----------
    path : str
        Of a `config.json`.
    task : str
        One of `TASKS`: which head and loss the model gets, and what its batches are.
    batch_size : int
    length : int or None
        By default `DEFAULT_LENGTH`, or the longest that the model takes.

    Raises
    ------
    InvalidOptionError
        If the file cannot be read, its model type is unknown, it has no such head, or a length has
        no meaning for it.
    """
    if task not in _HEADS:
        raise InvalidOptionError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        kind = data["model_type"]
        config: Any = transformers.AutoConfig.for_model(**data)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidOptionError(
            f'"{path}" must be a configuration of transformers, JSON with a known "model_type", got an error: {error}'
        ) from error
    config.use_cache = False
    auto, mapping = (getattr(transformers, name) for name in _HEADS[task])
    if type(config) not in mapping:
        raise InvalidOptionError(f'a model of type "{kind}" has no head for the task "{task}": try another --task')

    def make_model() -> nn.Module:
        return cast("nn.Module", auto.from_config(config)).train()

    if task == "image-classification":
        size, channels = getattr(config, "image_size", 224), getattr(config, "num_channels", 3)
        height, width = (size, size) if isinstance(size, int) else size

        def image_batch(batch_size: int) -> Arguments:
            images = torch.zeros(batch_size, channels, height, width)
            return (), {"pixel_values": images, "labels": torch.zeros(batch_size, dtype=torch.long)}

        if length is not None:
            raise InvalidOptionError("a length has no meaning for the task image-classification")
        return SizedModel(
            name=kind, make_model=make_model, make_batch=image_batch, loss=_loss, batch_size=batch_size, length=None
        )

    def token_batch(batch_size: int, length: int) -> Arguments:
        tokens = torch.zeros(batch_size, length, dtype=torch.long)
        labels = torch.zeros(
            batch_size if task == "sequence-classification" else (batch_size, length), dtype=torch.long
        )
        return (), {"input_ids": tokens, "labels": labels}

    longest = getattr(config, "max_position_embeddings", None)
    known = longest if isinstance(longest, int) else None
    return SizedModel(
        name=kind,
        make_model=make_model,
        make_batch=token_batch,
        loss=_loss,
        batch_size=batch_size,
        length=length or min(DEFAULT_LENGTH, known or DEFAULT_LENGTH),
        longest=known,
    )


def _loss(outputs: Any) -> Tensor:
    return cast("Tensor", outputs.loss)

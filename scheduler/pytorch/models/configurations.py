"""Models of transformers from their configuration files, without weights."""

from __future__ import annotations

import difflib
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
    kind, config = _read(path)
    config.use_cache = False
    auto, mapping = (getattr(transformers, name) for name in _HEADS[task])
    if type(config) not in mapping:
        raise InvalidOptionError(f'a model of type "{kind}" has no head for the task "{task}": try another --task')

    def make_model() -> nn.Module:
        try:
            return cast("nn.Module", auto.from_config(config)).train()
        except Exception as error:  # each model checks its configuration in its own way
            raise InvalidOptionError(
                f'no model can be built from "{path}": {type(error).__name__}: {error}. Correct the file'
            ) from error

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
    if length is not None and known is not None and length > known:
        raise InvalidOptionError(
            f'length must be at most {known}, as max_position_embeddings in "{path}" says, got {length}'
        )
    return SizedModel(
        name=kind,
        make_model=make_model,
        make_batch=token_batch,
        loss=_loss,
        batch_size=batch_size,
        length=length or min(DEFAULT_LENGTH, known or DEFAULT_LENGTH),
        longest=known,
    )


def _read(path: str) -> tuple[str, Any]:
    """Return the model type of a configuration file, and the configuration."""
    what = f'"{path}" must be a configuration of transformers'
    try:
        data: object = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidOptionError(f"{what}, which cannot be read: {error}") from error
    kind = data.get("model_type") if isinstance(data, dict) else None
    if not isinstance(data, dict) or not isinstance(kind, str):
        raise InvalidOptionError(f'{what}, a JSON object with a "model_type" such as "gpt2", and has none')
    known = [*transformers.CONFIG_MAPPING]
    if kind not in known:
        near = difflib.get_close_matches(kind, known, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "a newer version may know it."
        own = (
            ' Its "auto_map" names code of its own, which is not run: write a factory package.module:function.'
            if "auto_map" in data
            else ""
        )
        raise InvalidOptionError(
            f'{what} with a known "model_type", got "{kind}", which transformers {transformers.__version__} does not'
            f" have: {hint}{own}"
        )
    try:
        return kind, transformers.AutoConfig.for_model(**data)
    except Exception as error:  # each configuration checks its values in its own way
        raise InvalidOptionError(f"{what}, which refuses its values: {type(error).__name__}: {error}") from error


def _loss(outputs: Any) -> Tensor:
    return cast("Tensor", outputs.loss)

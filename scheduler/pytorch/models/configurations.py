"""Models of transformers from their configuration files, without weights."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
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
    "masked-image-modeling": ("AutoModelForMaskedImageModeling", "MODEL_FOR_MASKED_IMAGE_MODELING_MAPPING"),
    "speech-to-text": ("AutoModelForSpeechSeq2Seq", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING"),
}
"""By task, what builds a model in transformers, and which configurations have that head."""
_MASKED_AUTOENCODER = "vit_mae"
"""A masked image model that draws its masks itself; transformers lists its head under pretraining."""
_FACTORY = "write a factory package.module:function instead"
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
    auto = _builder(config, kind, task)
    _complete(config, kind, task)

    def make_model() -> nn.Module:
        try:
            return cast("nn.Module", auto.from_config(config)).train()
        except Exception as error:  # each model checks its configuration in its own way
            raise InvalidOptionError(
                f'no model can be built from "{path}": {type(error).__name__}: {error}. Correct the file'
            ) from error

    if "image" in task:
        if length is not None:
            raise InvalidOptionError(f"a length has no meaning for the task {task}")

        def image_batch(batch_size: int) -> Arguments:
            return (), _images(config, kind, task, batch_size)

        return SizedModel(
            name=kind, make_model=make_model, make_batch=image_batch, loss=_loss, batch_size=batch_size, length=None
        )

    def token_batch(batch_size: int, length: int) -> Arguments:
        tokens = torch.zeros(batch_size, length, dtype=torch.long)
        if task == "speech-to-text":  # of one window of audio, in which two frames give a position
            return (), {
                "input_features": torch.zeros(batch_size, config.num_mel_bins, 2 * config.max_source_positions),
                "labels": tokens,
            }
        return (), {"input_ids": tokens, "labels": _classes(config, batch_size) if _is_classified(task) else tokens}

    limit = "max_target_positions" if hasattr(config, "max_target_positions") else "max_position_embeddings"
    longest = getattr(config, limit, None)
    known = longest if isinstance(longest, int) and longest > 0 else None  # XLNet's -1 is no limit
    if length is not None and known is not None and length > known:
        raise InvalidOptionError(f'length must be at most {known}, as {limit} in "{path}" says, got {length}')
    return SizedModel(
        name=kind,
        make_model=make_model,
        make_batch=token_batch,
        loss=_loss,
        batch_size=batch_size,
        length=length or min(DEFAULT_LENGTH, known or DEFAULT_LENGTH),
        longest=known,
    )


def _builder(config: Any, kind: str, task: str) -> Any:
    """Return what builds a model with the head of a task."""

    def head(task: str) -> tuple[str, str]:
        if (kind, task) == (_MASKED_AUTOENCODER, "masked-image-modeling"):
            return "AutoModelForPreTraining", "MODEL_FOR_PRETRAINING_MAPPING"
        return _HEADS[task]

    known = [task for task in TASKS if type(config) in getattr(transformers, head(task)[1])]
    if task not in known:
        instead = f"it has one for {', '.join(known)}" if known else _FACTORY
        raise InvalidOptionError(f'a model of type "{kind}" has no head for the task "{task}": {instead}')
    return getattr(transformers, head(task)[0])


def _is_classified(task: str) -> bool:
    """Return whether a task gives one answer for each sequence or image."""
    return task in ("sequence-classification", "image-classification")


def _complete(config: Any, kind: str, task: str) -> None:
    """Set what a head needs and a file may leave to the trainer; sizes do not depend on it.

    Raises
    ------
    InvalidOptionError
        If the head cannot run without the values of its inputs, or its inputs are not known.
    """
    config.use_cache = False
    if task == "speech-to-text" and kind != "whisper":
        raise InvalidOptionError(f'for the task "{task}", only inputs of "whisper" are known, got "{kind}": {_FACTORY}')
    if task == "sequence-classification" and getattr(config, "is_encoder_decoder", False):
        raise InvalidOptionError(
            f'a model of type "{kind}" looks for the end of each sequence among the values of its tokens, so it cannot'
            f' be captured without data for the task "{task}": ask about --task seq2seq-lm, whose body is the same'
        )
    if _is_classified(task) and config.problem_type is None and config.num_labels > 1:
        config.problem_type = "single_label_classification"
    for name in ("pad_token_id", "decoder_start_token_id"):
        if task in ("sequence-classification", "seq2seq-lm", "speech-to-text") and getattr(config, name, None) is None:
            setattr(config, name, 0)


def _images(config: Any, kind: str, task: str, batch_size: int) -> dict[str, object]:
    """Return the inputs of a model of images."""
    height, width = _pair(getattr(config, "image_size", 224))
    images: dict[str, object] = {
        "pixel_values": torch.zeros(batch_size, getattr(config, "num_channels", 3), height, width)
    }
    if task == "image-classification":
        return {**images, "labels": _classes(config, batch_size)}
    if kind == _MASKED_AUTOENCODER:
        return images
    down, right = _pair(config.patch_size)
    return {**images, "bool_masked_pos": torch.zeros(batch_size, (height // down) * (width // right), dtype=torch.bool)}


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def _classes(config: Any, batch_size: int) -> Tensor:
    """Return the labels of a classification: a class for each sample, or a number for each label."""
    if config.problem_type == "single_label_classification":
        return torch.zeros(batch_size, dtype=torch.long)
    return torch.zeros(batch_size, config.num_labels)


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

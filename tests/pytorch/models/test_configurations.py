"""Models of configuration files, with the head and the batches of a task."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from scheduler.errors import InvalidOptionError

pytest.importorskip("transformers")

from scheduler.pytorch import trace
from scheduler.pytorch.models.configurations import read_configuration
from scheduler.pytorch.models.sized_models import SizedModel

WIDTHS = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
IMAGES = {**WIDTHS, "image_size": 8, "patch_size": 2}
TEXT = {**WIDTHS, "vocab_size": 50, "max_position_embeddings": 12}
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 50, "n_positions": 12}
BART = {"model_type": "bart", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 50}
WHISPER = {
    "model_type": "whisper",
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "vocab_size": 50,
    "pad_token_id": 0,
    "num_mel_bins": 5,
    "max_source_positions": 6,
    "max_target_positions": 7,
}


def read(folder: Path, values: object, task: str, length: int | None = None) -> SizedModel:
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    return read_configuration(str(path), task, batch_size=2, length=length)


@pytest.mark.parametrize(
    ("values", "task", "shapes"),
    [
        (WHISPER, "speech-to-text", {"input_features": (2, 5, 12), "labels": (2, 7)}),
        (
            {"model_type": "vit_mae", **IMAGES, "decoder_num_hidden_layers": 1},
            "masked-image-modeling",
            {"pixel_values": (2, 3, 8, 8)},
        ),
        (
            {"model_type": "vit", **IMAGES, "encoder_stride": 2},
            "masked-image-modeling",
            {"pixel_values": (2, 3, 8, 8), "bool_masked_pos": (2, 16)},
        ),
        ({"model_type": "deberta-v2", **TEXT}, "sequence-classification", {"input_ids": (2, 12), "labels": (2,)}),
        (
            {**GPT2, "problem_type": "multi_label_classification", "num_labels": 3},
            "sequence-classification",
            {"input_ids": (2, 12), "labels": (2, 3)},
        ),
    ],
)
def test_the_batches_of_a_task_train_its_head_without_data(
    values: object, task: str, shapes: object, tmp_path: Path
) -> None:
    given = read(tmp_path, values, task)
    with torch.device("meta"):
        model = given.make_model()
        args, kwargs = given.make_batch(2) if given.length is None else given.make_batch(2, given.length)
    assert {name: tuple(value.shape) for name, value in kwargs.items() if isinstance(value, torch.Tensor)} == shapes
    graph = trace(model, args, kwargs, loss=given.loss, costs="flops")
    sizes = Counter(graph.tensor(name).size_bytes for name in graph.results if graph.tensor(name).role == "gradient")
    trained = (4 * p.numel() for p in model.parameters() if p.requires_grad)
    assert sizes == Counter([4, *trained])  # the first is the gradient of the loss


def test_a_length_that_means_no_limit_is_none(tmp_path: Path) -> None:
    assert read(tmp_path, {"model_type": "xlnet"}, "causal-lm").longest is None


@pytest.mark.parametrize(
    ("values", "task", "length", "message"),
    [
        (
            GPT2,
            "masked-lm",
            None,
            "no head for the task .masked-lm.: it has one for causal-lm, sequence-classification",
        ),
        (BART, "sequence-classification", None, "among the values of its tokens, .* ask about --task seq2seq-lm"),
        ({"model_type": "speech_to_text"}, "speech-to-text", None, "only inputs of .whisper. are known"),
        (WHISPER, "speech-to-text", 8, "length must be at most 7, as max_target_positions"),
        ({"model_type": "vit"}, "masked-image-modeling", 8, "a length has no meaning for the task masked-image"),
    ],
)
def test_a_task_that_does_not_suit_a_configuration_names_another_way(
    values: object, task: str, length: int | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        read(tmp_path, values, task, length)

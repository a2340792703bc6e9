"""Networks from transformers, built from configurations with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import transformers
from torch import Tensor, nn

from scheduler.pytorch.models.batches import image_batches, random_case, token_batches
from scheduler.pytorch.models.catalog import Arguments, ModelCase


def gpt2(
    *,
    seed: int = 0,
    batch_size: int = 4,
    layers: int = 6,
    width: int = 256,
    heads: int = 4,
    length: int = 256,
    vocabulary: int = 2048,
    dropout: float = 0.1,
) -> ModelCase:
    """Return a GPT-2."""
    config = transformers.GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        n_positions=length,
        vocab_size=vocabulary,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return _language_case("hf-gpt2", lambda: transformers.GPT2LMHeadModel(config), seed, batch_size, length, vocabulary)


def llama(
    *, seed: int = 0, batch_size: int = 4, layers: int = 4, width: int = 256, length: int = 256, vocabulary: int = 2048
) -> ModelCase:
    """Return a Llama with grouped-query attention."""
    config = transformers.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=3 * width,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=length,
        vocab_size=vocabulary,
        use_cache=False,
    )
    return _language_case(
        "hf-llama", lambda: transformers.LlamaForCausalLM(config), seed, batch_size, length, vocabulary
    )


def bert(
    *,
    seed: int = 0,
    batch_size: int = 4,
    layers: int = 4,
    width: int = 256,
    length: int = 256,
    vocabulary: int = 2048,
    dropout: float = 0.1,
) -> ModelCase:
    """Return a BERT that predicts masked tokens."""
    config = transformers.BertConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=4,
        max_position_embeddings=length,
        vocab_size=vocabulary,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return _language_case("hf-bert", lambda: transformers.BertForMaskedLM(config), seed, batch_size, length, vocabulary)


def t5(
    *,
    seed: int = 0,
    batch_size: int = 4,
    layers: int = 3,
    width: int = 256,
    length: int = 128,
    vocabulary: int = 2048,
    dropout: float = 0.1,
) -> ModelCase:
    """Return a T5: an encoder and a decoder."""
    config = transformers.T5Config(  # type: ignore[call-arg]
        num_layers=layers,
        num_decoder_layers=layers,
        d_model=width,
        d_kv=width // 4,
        d_ff=4 * width,
        num_heads=4,
        vocab_size=vocabulary,
        decoder_start_token_id=0,
        use_cache=False,
        dropout_rate=dropout,
    )
    return _language_case(
        "hf-t5", lambda: transformers.T5ForConditionalGeneration(config), seed, batch_size, length, vocabulary
    )


def vit(
    *,
    seed: int = 0,
    batch_size: int = 4,
    layers: int = 6,
    width: int = 192,
    size: int = 112,
    classes: int = 10,
    dropout: float = 0.1,
) -> ModelCase:
    """Return a vision transformer for square images of `size` pixels a side."""
    config = transformers.ViTConfig(  # type: ignore[call-arg]
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=3,
        image_size=size,
        patch_size=8,
        num_labels=classes,
        hidden_dropout_prob=dropout,
    )
    make_batch = _named(image_batches(batch_size, size, classes), "pixel_values")
    return random_case("hf-vit", lambda: transformers.ViTForImageClassification(config), seed, make_batch, _output_loss)


def _language_case(
    name: str, make_module: Callable[[], nn.Module], seed: int, batch_size: int, length: int, vocabulary: int
) -> ModelCase:
    make_batch = _named(token_batches(batch_size, length, vocabulary), "input_ids")
    return random_case(name, make_module, seed, make_batch, _output_loss)


def _named(make_batch: Callable[[int], Arguments], inputs: str) -> Callable[[int], Arguments]:
    """Return a function from a seed to a batch with the inputs under a given name and the targets as labels."""

    def make(seed: int) -> Arguments:
        (values, targets), _ = make_batch(seed)
        return (), {inputs: values, "labels": targets}

    return make


def _output_loss(outputs: object) -> Tensor:
    """Return the loss in the outputs of a transformers model."""
    return cast("Tensor", outputs.loss)  # type: ignore[attr-defined]

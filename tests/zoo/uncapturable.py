"""Models of libraries whose steps cannot be captured, each with batches of differing shapes and a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.pytorch.uncapturable import Batch, Case, mean_square
from tests.zoo.models import DECODER, loss_of


def speech() -> Case:
    """Return a wav2vec2 that masks its features at random, drops layers, and is trained by CTC."""
    import transformers

    config = transformers.Wav2Vec2Config(
        **DECODER,
        vocab_size=12,
        conv_dim=(16, 16),
        conv_stride=(5, 4),
        conv_kernel=(10, 8),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        mask_time_prob=0.3,
        mask_time_length=2,
        layerdrop=0.3,
    )

    def batch(seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        audio = torch.randn(2, 1600 + 160 * (seed % 3), generator=generator)
        return (), {"input_values": audio, "labels": torch.randint(1, 12, (2, 5), generator=generator)}

    return Case(transformers.Wav2Vec2ForCTC(config).train(), batch, loss_of)


def words(seed: int, vocabulary: int = 96) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary, (2, 24 + 4 * (seed % 3)), generator=generator)


def language(model_class: str, config_class: str, **config: Any) -> Case:
    """Return a language model of transformers that returns its own loss."""
    import transformers

    made = getattr(transformers, config_class)(vocab_size=96, pad_token_id=0, bos_token_id=1, eos_token_id=2, **config)
    model = getattr(transformers, model_class)(made).train()
    return Case(model, lambda seed: ((), {"input_ids": words(seed), "labels": words(seed)}), loss_of)


class GraphNetwork(nn.Module):
    """Layers of torch_geometric, which look for self loops."""

    def __init__(self, layer: str, **options: Any) -> None:
        super().__init__()
        import torch_geometric

        self.layers = nn.ModuleList(getattr(torch_geometric.nn, layer)(16, 16, **options) for _ in range(3))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x, edges))
        return x


def graphs(layer: str, **options: Any) -> Case:
    def batch(seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        count = 30 + 10 * (seed % 3)
        return (torch.randn(count, 16, generator=generator), torch.randint(0, count, (2, 90), generator=generator)), {}

    return Case(GraphNetwork(layer, **options), batch, mean_square)


def adapted() -> Case:
    """Return a GPT-2 with adapters of peft, of which layers are dropped while it trains."""
    import peft

    case = language("GPT2LMHeadModel", "GPT2Config", n_embd=32, n_layer=2, n_head=4, n_positions=64)
    adapters = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
    return Case(peft.get_peft_model(case.model, adapters).train(), case.batch, loss_of)


def detection() -> Case:
    """Return a detector of torchvision, whose number of boxes depends on the data."""
    import torchvision

    model = torchvision.models.detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None)

    def batch(seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        images = [torch.rand(3, 60 + 10 * (seed % 2), 80, generator=generator) for _ in range(2)]
        boxes = torch.tensor([[5.0, 5.0, 40.0, 40.0], [20.0, 10.0, 50.0, 55.0]])
        return (images, [{"boxes": boxes, "labels": torch.tensor([1, 2])} for _ in images]), {}

    return Case(model.train(), batch, lambda losses: sum(losses.values()))  # type: ignore[arg-type, return-value]


def diffusion() -> Case:
    """Return a U-Net of diffusers with checkpoints of its own."""
    import diffusers

    model = diffusers.UNet2DModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    model.enable_gradient_checkpointing()

    def batch(seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        noisy = torch.randn(2, 3, 16 + 8 * (seed % 2), 16, generator=generator)
        return (), {"sample": noisy, "timestep": torch.randint(0, 1000, (2,), generator=generator)}

    return Case(model.train(), batch, lambda out: out.sample.square().mean())  # type: ignore[attr-defined]


MIXTURE = {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
ENCODER_DECODER = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}

CASES: dict[str, Callable[[], Case]] = {
    "wav2vec2": speech,
    "mixtral": lambda: language("MixtralForCausalLM", "MixtralConfig", **MIXTURE, experts_implementation="eager"),
    "bart with dropped layers": lambda: language(
        "BartForConditionalGeneration", "BartConfig", **ENCODER_DECODER, encoder_layerdrop=0.4, decoder_layerdrop=0.4
    ),
    "gpt2 with a cache": lambda: language("GPT2LMHeadModel", "GPT2Config", n_embd=32, n_layer=2, n_head=4),
    "llama with a cache": lambda: language("LlamaForCausalLM", "LlamaConfig", **DECODER),
    "gcn": lambda: graphs("GCNConv"),
    "gat": lambda: graphs("GATConv", heads=2, concat=False, dropout=0.2),
    "adapters": adapted,
    "ssdlite": detection,
    "diffusion with its own checkpoints": diffusion,
}

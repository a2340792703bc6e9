"""Small models of timm, transformers, peft and diffusers, each with a batch and a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class ZooCase:
    """A model that trains, batches for it, and its loss; without a loss the model returns it."""

    model: nn.Module
    batch: Callable[[int], Batch]
    loss: Callable[[Any], Tensor] | None = None


def timm_case(name: str, size: int = 64, **options: Any) -> ZooCase:
    """Return an image classifier of timm."""
    import timm

    model = timm.create_model(name, pretrained=False, num_classes=10, **options)

    def batch(seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        return (torch.randn(2, 3, size, size, generator=generator),), {}

    return ZooCase(model, batch, lambda logits: F.cross_entropy(logits, torch.arange(2)))


def text_case(model_class: str, config_class: str, *, labels: bool = True, **config: Any) -> ZooCase:
    """Return a language model of transformers that returns its own loss."""
    import transformers

    made = getattr(transformers, config_class)(vocab_size=96, pad_token_id=0, bos_token_id=1, eos_token_id=2, **config)
    model = getattr(transformers, model_class)(made)

    def batch(seed: int) -> Batch:
        ids = torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(seed))
        return (), {"input_ids": ids, "labels": ids} if labels else {"input_ids": ids}

    return ZooCase(model.train(), batch, loss_of if labels else lambda out: out.last_hidden_state.square().mean())


def loss_of(output: Any) -> Tensor:
    """Return the loss in a model output."""
    loss: Tensor = output.loss
    return loss


DECODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def vision_case(model_class: str, config_class: str, **config: Any) -> ZooCase:
    """Return an image classifier of transformers."""
    import transformers

    made = getattr(transformers, config_class)(num_labels=10, **config)
    model = getattr(transformers, model_class)(made)

    def batch(seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        return (), {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator), "labels": torch.arange(2)}

    return ZooCase(model.train(), batch, loss_of)


def adapted_case(config: Any) -> ZooCase:
    """Return a GPT-2 with adapters of peft, whose other parameters are frozen."""
    import peft

    case = text_case("GPT2LMHeadModel", "GPT2Config", n_embd=32, n_layer=2, n_head=4, n_positions=32)
    return ZooCase(peft.get_peft_model(case.model, config).train(), case.batch, loss_of)


def lora_case() -> ZooCase:
    """Return a GPT-2 with LoRA."""
    import peft

    return adapted_case(
        peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True, r=4, lora_dropout=0.1)
    )


def ia3_case() -> ZooCase:
    """Return a GPT-2 with IA3, which scales activations."""
    import peft

    return adapted_case(
        peft.IA3Config(
            task_type="CAUSAL_LM",
            target_modules=["c_attn", "mlp.c_proj"],
            feedforward_modules=["mlp.c_proj"],
            fan_in_fan_out=True,
        )
    )


def unet_case() -> ZooCase:
    """Return the denoising U-Net of diffusers."""
    import diffusers

    model = diffusers.UNet2DModel(
        sample_size=16,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
        attention_head_dim=8,
    )
    return ZooCase(model, lambda seed: (_noise(seed, 3), {}), lambda out: out.sample.square().mean())


def diffusion_transformer_case() -> ZooCase:
    """Return the diffusion transformer DiT of diffusers."""
    import diffusers

    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, num_layers=2, sample_size=16, norm_num_groups=4
    )

    def batch(seed: int) -> Batch:
        return _noise(seed, 4), {"class_labels": torch.tensor([1, 2])}

    return ZooCase(model.train(), batch, lambda out: out.sample.square().mean())


def autoencoder_case() -> ZooCase:
    """Return the decoder half of the autoencoder of diffusers; its encoder draws through an own generator."""
    import diffusers

    model = diffusers.AutoencoderKL(block_out_channels=(16,), norm_num_groups=4, sample_size=16)
    return ZooCase(model.decoder, lambda seed: ((_noise(seed, 4)[0],), {}), lambda out: out.square().mean())


def _noise(seed: int, channels: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, channels, 16, 16, generator=generator), torch.tensor([10, 500])


CASES: dict[str, Callable[[], ZooCase]] = {
    "timm resnet18": lambda: timm_case("resnet18"),
    "timm convnext_atto": lambda: timm_case("convnext_atto", drop_path_rate=0.1),
    "timm vit_tiny": lambda: timm_case("vit_tiny_patch16_224", img_size=64, drop_rate=0.1, drop_path_rate=0.1),
    "timm mobilenetv3": lambda: timm_case("mobilenetv3_small_050", drop_rate=0.2),
    "timm efficientnet_b0": lambda: timm_case("efficientnet_b0", drop_path_rate=0.2),
    "timm mixer": lambda: timm_case("mixer_s32_224", img_size=64),
    "timm regnet": lambda: timm_case("regnetx_002"),
    "timm densenet121": lambda: timm_case("densenet121"),
    "timm swin": lambda: timm_case("swin_tiny_patch4_window7_224", size=56, img_size=56),
    "timm xcit": lambda: timm_case("xcit_nano_12_p16_224", img_size=64),
    "gpt_neox": lambda: text_case("GPTNeoXForCausalLM", "GPTNeoXConfig", **DECODER),
    "opt": lambda: text_case(
        "OPTForCausalLM",
        "OPTConfig",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=64,
        word_embed_proj_dim=32,
        layerdrop=0.0,
    ),
    "mistral": lambda: text_case("MistralForCausalLM", "MistralConfig", num_key_value_heads=2, **DECODER),
    "qwen2": lambda: text_case("Qwen2ForCausalLM", "Qwen2Config", num_key_value_heads=2, **DECODER),
    "gemma": lambda: text_case("GemmaForCausalLM", "GemmaConfig", num_key_value_heads=2, head_dim=8, **DECODER),
    "phi": lambda: text_case("PhiForCausalLM", "PhiConfig", **DECODER),
    "roberta": lambda: text_case("RobertaForMaskedLM", "RobertaConfig", **DECODER),
    "electra": lambda: text_case("ElectraForMaskedLM", "ElectraConfig", embedding_size=32, **DECODER),
    "distilbert": lambda: text_case(
        "DistilBertForMaskedLM", "DistilBertConfig", dim=32, n_layers=2, n_heads=4, hidden_dim=64
    ),
    "bart": lambda: text_case(
        "BartForConditionalGeneration",
        "BartConfig",
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        decoder_start_token_id=2,
    ),
    "convnextv2": lambda: vision_case(
        "ConvNextV2ForImageClassification", "ConvNextV2Config", hidden_sizes=[8, 16, 32, 64], depths=[1, 1, 1, 1]
    ),
    "vit": lambda: vision_case("ViTForImageClassification", "ViTConfig", image_size=32, patch_size=8, **DECODER),
    "lora": lora_case,
    "ia3": ia3_case,
    "diffusers unet": unet_case,
    "diffusers dit": diffusion_transformer_case,
    "diffusers decoder": autoencoder_case,
}

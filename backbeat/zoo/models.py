"""The zoo's models as factories: `backbeat profile backbeat.zoo.models:resnet50`.

Random weights and random data: times and sizes depend on neither. Images are 224 × 224 unless said otherwise.
Dropout stays at each library's default. Models are built on the device itself, which is quicker for the large ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backbeat.errors import MissingPartError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    Workload = tuple[torch.nn.Module, Any, Callable[[torch.nn.Module, Any], torch.Tensor]]

_CLASSES = 1000


def resnet50(batch_size: int = 64, device: str = "cpu") -> Workload:
    """ResNet-50 (torchvision), 224 × 224 images, cross entropy over 1000 classes."""
    return _vision("resnet50", batch_size, device)


def resnet101(batch_size: int = 64, device: str = "cpu") -> Workload:
    """ResNet-101 (torchvision), 224 × 224 images, cross entropy over 1000 classes."""
    return _vision("resnet101", batch_size, device)


def resnet152(batch_size: int = 64, device: str = "cpu") -> Workload:
    """ResNet-152 (torchvision), 224 × 224 images, cross entropy over 1000 classes."""
    return _vision("resnet152", batch_size, device)


def vgg16(batch_size: int = 64, device: str = "cpu") -> Workload:
    """VGG-16 without batch norm (torchvision), 224 × 224 images, cross entropy over 1000 classes."""
    return _vision("vgg16", batch_size, device, init_weights=False)


def densenet121(batch_size: int = 64, device: str = "cpu") -> Workload:
    """DenseNet-121 (torchvision), 224 × 224 images, cross entropy over 1000 classes."""
    return _vision("densenet121", batch_size, device)


def densenet161(batch_size: int = 64, device: str = "cpu") -> Workload:
    """DenseNet-161 (torchvision), 224 × 224 images, cross entropy over 1000 classes."""
    return _vision("densenet161", batch_size, device)


def densenet201(batch_size: int = 64, device: str = "cpu") -> Workload:
    """DenseNet-201 (torchvision), 224 × 224 images, cross entropy over 1000 classes."""
    return _vision("densenet201", batch_size, device)


def googlenet(batch_size: int = 64, device: str = "cpu") -> Workload:
    """GoogLeNet with batch norm and both auxiliary heads, weighted 0.3 (torchvision), 224 × 224 images."""
    return _vision("googlenet", batch_size, device, auxiliary=0.3, aux_logits=True, init_weights=False)


def inception_v3(batch_size: int = 64, device: str = "cpu") -> Workload:
    """Inception-v3 with its auxiliary head, weighted 0.4 (torchvision), 299 × 299 images."""
    return _vision("inception_v3", batch_size, device, pixels=299, auxiliary=0.4, aux_logits=True, init_weights=False)


def efficientnet_b0(batch_size: int = 64, device: str = "cpu") -> Workload:
    """EfficientNet-B0 (torchvision), 224 × 224 images, cross entropy over 1000 classes."""
    return _vision("efficientnet_b0", batch_size, device)


def convnext_tiny(batch_size: int = 64, device: str = "cpu") -> Workload:
    """ConvNeXt-Tiny (torchvision), 224 × 224 images, cross entropy over 1000 classes."""
    return _vision("convnext_tiny", batch_size, device)


def vit_b(batch_size: int = 64, device: str = "cpu") -> Workload:
    """ViT-B/16 (torchvision), 224 × 224 images, cross entropy over 1000 classes."""
    return _vision("vit_b_16", batch_size, device)


def vit_l(batch_size: int = 64, device: str = "cpu") -> Workload:
    """ViT-L/16 (torchvision), 224 × 224 images, cross entropy over 1000 classes."""
    return _vision("vit_l_16", batch_size, device)


def bert_base(batch_size: int = 64, device: str = "cpu") -> Workload:
    """BERT-Base, masked language model (transformers), 128 tokens a sample."""
    return _bert(batch_size, device)


def bert_large(batch_size: int = 64, device: str = "cpu") -> Workload:
    """BERT-Large, masked language model (transformers), 128 tokens a sample."""
    return _bert(
        batch_size, device, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )


def gpt2(batch_size: int = 8, device: str = "cpu") -> Workload:
    """GPT-2 small, causal language model (transformers), 1024 tokens a sample."""
    return _gpt2(batch_size, device)


def gpt2_medium(batch_size: int = 8, device: str = "cpu") -> Workload:
    """GPT-2 medium, causal language model (transformers), 1024 tokens a sample."""
    return _gpt2(batch_size, device, n_embd=1024, n_layer=24, n_head=16)


def t5_base(batch_size: int = 16, device: str = "cpu") -> Workload:
    """T5-Base, encoder and decoder (transformers), 512 tokens in and 114 out a sample."""
    from_transformers = _transformers()
    config = from_transformers.T5Config(
        d_model=768, d_ff=3072, num_layers=12, num_heads=12, decoder_start_token_id=0, use_cache=False
    )
    model = _on(device, lambda: from_transformers.T5ForConditionalGeneration(config))
    batch = {
        "input_ids": _tokens(config.vocab_size, batch_size, 512, device),
        "labels": _tokens(config.vocab_size, batch_size, 114, device),
    }
    return model, batch, _own_loss


def llama_1b(batch_size: int = 4, device: str = "cpu", layers: int = 16) -> Workload:
    """A Llama of 1.24 billion parameters, tied embeddings (transformers), 1024 tokens a sample."""
    return _llama(
        batch_size,
        device,
        1024,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers,
        tie_word_embeddings=True,
    )


def llama_8b(batch_size: int = 1, device: str = "cpu", layers: int = 32) -> Workload:
    """A Llama of 8.03 billion parameters in the shapes of Llama 3 8B (transformers), 4096 tokens a sample."""
    return _llama(batch_size, device, 4096, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers)


def _vision(
    name: str, batch_size: int, device: str, *, pixels: int = 224, auxiliary: float = 0.0, **options: Any
) -> Workload:
    import torch
    from torch.nn.functional import cross_entropy

    try:
        from torchvision import models  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise MissingPartError(f"{name} needs torchvision: pip install torchvision") from None
    model = _on(device, lambda: getattr(models, name)(weights=None, **options))
    images = torch.randn(batch_size, 3, pixels, pixels, device=device)
    labels = torch.randint(0, _CLASSES, (batch_size,), device=device)

    def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        output = model(images)
        if not auxiliary:
            return cross_entropy(output, labels)
        main, *others = (head for head in output if head is not None)
        total = cross_entropy(main, labels)
        for other in others:
            total = total + auxiliary * cross_entropy(other, labels)
        return total

    return model, (images, labels), loss


def _bert(batch_size: int, device: str, **options: Any) -> Workload:
    import torch

    from_transformers = _transformers()
    config = from_transformers.BertConfig(**options)
    model = _on(device, lambda: from_transformers.BertForMaskedLM(config))
    tokens = _tokens(config.vocab_size, batch_size, 128, device)
    masked = torch.rand(tokens.shape, device=device) < 0.15
    # One label at least, or the mean over none is not a number.
    masked[:, 0] = True
    labels = torch.where(masked, tokens, torch.full_like(tokens, -100))
    # No attention mask: every sample is full, and transformers would wait for the device to look at one.
    return model, {"input_ids": tokens, "labels": labels}, _own_loss


def _gpt2(batch_size: int, device: str, **options: Any) -> Workload:
    from_transformers = _transformers()
    config = from_transformers.GPT2Config(use_cache=False, **options)
    model = _on(device, lambda: from_transformers.GPT2LMHeadModel(config))
    return model, _causal_batch(config.vocab_size, batch_size, 1024, device), _own_loss


def _llama(batch_size: int, device: str, length: int, **options: Any) -> Workload:
    from_transformers = _transformers()
    config = from_transformers.LlamaConfig(
        vocab_size=128256,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        use_cache=False,
        **options,
    )
    model = _on(device, lambda: from_transformers.LlamaForCausalLM(config))
    return model, _causal_batch(config.vocab_size, batch_size, length, device), _own_loss


def _causal_batch(vocabulary: int, batch_size: int, length: int, device: str) -> dict[str, torch.Tensor]:
    tokens = _tokens(vocabulary, batch_size, length, device)
    return {"input_ids": tokens, "labels": tokens}


def _tokens(vocabulary: int, batch_size: int, length: int, device: str) -> torch.Tensor:
    import torch

    return torch.randint(0, vocabulary, (batch_size, length), device=device)


def _own_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The language models compute their loss themselves when given labels."""
    loss: torch.Tensor = model(**batch).loss
    return loss


def _on(device: str, build: Callable[[], Any]) -> Any:
    import torch

    with torch.device(device):
        return build().train()


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise MissingPartError("this model needs transformers: pip install transformers") from None
    return transformers

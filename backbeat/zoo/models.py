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


def _vision(
    title: str, name: str, pixels: int = 224, *, auxiliary: float = 0.0, **options: Any
) -> Callable[..., Workload]:
    """The factory of a torchvision model; its first docstring line is what profiles say of it."""

    def factory(batch_size: int = 64, device: str = "cpu") -> Workload:
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
            return sum((auxiliary * cross_entropy(other, labels) for other in others), cross_entropy(main, labels))

        return model, (images, labels), loss

    what = f"{title} (torchvision), {pixels} × {pixels} images"
    factory.__doc__ = f"{what}." if auxiliary else f"{what}, cross entropy over {_CLASSES} classes."
    return factory


resnet50 = _vision("ResNet-50", "resnet50")
resnet101 = _vision("ResNet-101", "resnet101")
resnet152 = _vision("ResNet-152", "resnet152")
vgg16 = _vision("VGG-16 without batch norm", "vgg16", init_weights=False)
densenet121 = _vision("DenseNet-121", "densenet121")
densenet161 = _vision("DenseNet-161", "densenet161")
densenet201 = _vision("DenseNet-201", "densenet201")
efficientnet_b0 = _vision("EfficientNet-B0", "efficientnet_b0")
convnext_tiny = _vision("ConvNeXt-Tiny", "convnext_tiny")
vit_b = _vision("ViT-B/16", "vit_b_16")
vit_l = _vision("ViT-L/16", "vit_l_16")
googlenet = _vision(
    "GoogLeNet with batch norm and both auxiliary heads, weighted 0.3",
    "googlenet",
    auxiliary=0.3,
    aux_logits=True,
    init_weights=False,
)
inception_v3 = _vision(
    "Inception-v3 with its auxiliary head, weighted 0.4",
    "inception_v3",
    299,
    auxiliary=0.4,
    aux_logits=True,
    init_weights=False,
)


def _bert(title: str, **options: Any) -> Callable[..., Workload]:
    def factory(batch_size: int = 64, device: str = "cpu") -> Workload:
        import torch

        model, vocabulary = _transformer("BertConfig", "BertForMaskedLM", device, **options)
        tokens = _tokens(vocabulary, batch_size, 128, device)
        masked = torch.rand(tokens.shape, device=device) < 0.15
        # One label at least, or the mean over none is not a number.
        masked[:, 0] = True
        labels = torch.where(masked, tokens, torch.full_like(tokens, -100))
        # No attention mask: every sample is full, and transformers would wait for the device to look at one.
        return model, {"input_ids": tokens, "labels": labels}, _own_loss

    factory.__doc__ = f"{title}, masked language model (transformers), 128 tokens a sample."
    return factory


def _gpt2(title: str, **options: Any) -> Callable[..., Workload]:
    def factory(batch_size: int = 8, device: str = "cpu") -> Workload:
        made = _transformer("GPT2Config", "GPT2LMHeadModel", device, use_cache=False, **options)
        return _causal(*made, batch_size, 1024, device)

    factory.__doc__ = f"{title}, causal language model (transformers), 1024 tokens a sample."
    return factory


bert_base = _bert("BERT-Base")
bert_large = _bert("BERT-Large", hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
gpt2 = _gpt2("GPT-2 small")
gpt2_medium = _gpt2("GPT-2 medium", n_embd=1024, n_layer=24, n_head=16)


def t5_base(batch_size: int = 16, device: str = "cpu") -> Workload:
    """T5-Base, encoder and decoder (transformers), 512 tokens in and 114 out a sample."""
    sizes = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
    model, vocabulary = _transformer(
        "T5Config", "T5ForConditionalGeneration", device, decoder_start_token_id=0, use_cache=False, **sizes
    )
    tokens, labels = (_tokens(vocabulary, batch_size, length, device) for length in (512, 114))
    return model, {"input_ids": tokens, "labels": labels}, _own_loss


def llama_1b(batch_size: int = 4, device: str = "cpu", layers: int = 16) -> Workload:
    """A Llama of 1.24 billion parameters, tied embeddings (transformers), 1024 tokens a sample."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": layers}
    return _llama(batch_size, device, 1024, tie_word_embeddings=True, **sizes)


def llama_8b(batch_size: int = 1, device: str = "cpu", layers: int = 32) -> Workload:
    """A Llama of 8.03 billion parameters in the shapes of Llama 3 8B (transformers), 4096 tokens a sample."""
    return _llama(batch_size, device, 4096, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers)


def _llama(batch_size: int, device: str, length: int, **options: Any) -> Workload:
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    options |= heads | {"vocab_size": 128256, "max_position_embeddings": 8192, "use_cache": False}
    return _causal(*_transformer("LlamaConfig", "LlamaForCausalLM", device, **options), batch_size, length, device)


def _causal(model: Any, vocabulary: int, batch_size: int, length: int, device: str) -> Workload:
    tokens = _tokens(vocabulary, batch_size, length, device)
    return model, {"input_ids": tokens, "labels": tokens}, _own_loss


def _transformer(config: str, model: str, device: str, **options: Any) -> tuple[Any, int]:
    """The model of that class, and the size of its vocabulary."""
    transformers = _transformers()
    settings = getattr(transformers, config)(**options)
    return _on(device, lambda: getattr(transformers, model)(settings)), settings.vocab_size


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

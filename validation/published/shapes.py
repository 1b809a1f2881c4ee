"""Parameter shapes of the models that the papers trained, and the arithmetic each layer does.

Shapes and multiply-adds follow from the published architectures alone. Times do not: `analytic_profile` spreads a given
compute time over the layers by a stated assumption, and what it returns is named so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from backbeat.model import Gradient, Profile
from backbeat.model.files import Source

BYTES_PER_ELEMENT = 4
"""The papers train in fp32, and fp32 gradients travel."""
FORWARD_SHARE = 1 / 3
"""Assumed: backward takes twice as long as forward (two products a layer instead of one)."""

Spread = Literal["flops", "uniform"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One parameter."""

    name: str
    elements: int
    multiply_adds: float
    """Of its layer's forward pass, for one sample; on the layer's first parameter, 0 on its others."""


@dataclass
class Layers:
    """Collects parameters in forward order."""

    tensors: list[Tensor] = field(default_factory=list)

    def conv(
        self,
        name: str,
        inputs: int,
        outputs: int,
        kernel: int | tuple[int, int],
        side: int,
        *,
        bias: bool = False,
        norm: bool = True,
    ) -> None:
        """A convolution with an output of `side` × `side`, and the batch norm behind it."""
        high, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
        weights = inputs * outputs * high * wide
        self.tensors.append(Tensor(f"{name}.weight", weights, float(weights * side * side)))
        if bias:
            self.tensors.append(Tensor(f"{name}.bias", outputs, 0.0))
        if norm:
            self.norm(f"{name}.bn", outputs)

    def norm(self, name: str, width: int) -> None:
        self.tensors += [Tensor(f"{name}.weight", width, 0.0), Tensor(f"{name}.bias", width, 0.0)]

    def linear(self, name: str, inputs: int, outputs: int, rows: int = 1) -> None:
        """A dense layer applied to `rows` vectors of a sample."""
        self.tensors.append(Tensor(f"{name}.weight", inputs * outputs, float(inputs * outputs * rows)))
        self.tensors.append(Tensor(f"{name}.bias", outputs, 0.0))


def resnet(blocks: tuple[int, int, int, int]) -> list[Tensor]:
    """Bottleneck residual networks on 224 × 224 images; (3, 4, 6, 3) is ResNet-50, (3, 8, 36, 3) ResNet-152."""
    net = Layers()
    net.conv("conv1", 3, 64, 7, 112)
    inputs, side = 64, 56
    for stage, count in enumerate(blocks):
        width = 64 * 2**stage
        for block in range(count):
            name = f"layer{stage + 1}.{block}"
            strided = block == 0 and stage > 0
            net.conv(f"{name}.conv1", inputs, width, 1, side)
            side = side // 2 if strided else side
            net.conv(f"{name}.conv2", width, width, 3, side)
            net.conv(f"{name}.conv3", width, 4 * width, 1, side)
            if block == 0:
                net.conv(f"{name}.downsample", inputs, 4 * width, 1, side)
            inputs = 4 * width
    net.linear("fc", inputs, 1000)
    return net.tensors


def densenet(blocks: tuple[int, int, int, int], growth: int = 32) -> list[Tensor]:
    """Densely connected networks on 224 × 224 images; (6, 12, 48, 32) is DenseNet-201."""
    net = Layers()
    net.conv("conv0", 3, 2 * growth, 7, 112)
    width, side = 2 * growth, 56
    for stage, count in enumerate(blocks):
        for layer in range(count):
            name = f"block{stage + 1}.{layer + 1}"
            net.norm(f"{name}.norm1", width)
            net.conv(f"{name}.conv1", width, 4 * growth, 1, side)
            net.conv(f"{name}.conv2", 4 * growth, growth, 3, side, norm=False)
            width += growth
        net.norm(f"norm{stage + 1}", width)
        if stage < len(blocks) - 1:
            net.conv(f"transition{stage + 1}", width, width // 2, 1, side, norm=False)
            width, side = width // 2, side // 2
    net.linear("classifier", width, 1000)
    return net.tensors


def inception_v4() -> list[Tensor]:
    """Inception-v4 (Szegedy et al., 2016) on 299 × 299 images."""
    net = Layers()
    net.conv("stem.1", 3, 32, 3, 149)
    net.conv("stem.2", 32, 32, 3, 147)
    net.conv("stem.3", 32, 64, 3, 147)
    net.conv("stem.4", 64, 96, 3, 73)
    net.conv("stem.5a.1", 160, 64, 1, 73)
    net.conv("stem.5a.2", 64, 96, 3, 71)
    net.conv("stem.5b.1", 160, 64, 1, 73)
    net.conv("stem.5b.2", 64, 64, (1, 7), 73)
    net.conv("stem.5b.3", 64, 64, (7, 1), 73)
    net.conv("stem.5b.4", 64, 96, 3, 71)
    net.conv("stem.6", 192, 192, 3, 35)
    for block in range(4):
        name, side = f"a{block + 1}", 35
        net.conv(f"{name}.0", 384, 96, 1, side)
        net.conv(f"{name}.1.1", 384, 64, 1, side)
        net.conv(f"{name}.1.2", 64, 96, 3, side)
        net.conv(f"{name}.2.1", 384, 64, 1, side)
        net.conv(f"{name}.2.2", 64, 96, 3, side)
        net.conv(f"{name}.2.3", 96, 96, 3, side)
        net.conv(f"{name}.3", 384, 96, 1, side)
    net.conv("reduce_a.0", 384, 384, 3, 17)
    net.conv("reduce_a.1.1", 384, 192, 1, 35)
    net.conv("reduce_a.1.2", 192, 224, 3, 35)
    net.conv("reduce_a.1.3", 224, 256, 3, 17)
    for block in range(7):
        name, side = f"b{block + 1}", 17
        net.conv(f"{name}.0", 1024, 384, 1, side)
        net.conv(f"{name}.1.1", 1024, 192, 1, side)
        net.conv(f"{name}.1.2", 192, 224, (1, 7), side)
        net.conv(f"{name}.1.3", 224, 256, (7, 1), side)
        net.conv(f"{name}.2.1", 1024, 192, 1, side)
        net.conv(f"{name}.2.2", 192, 192, (7, 1), side)
        net.conv(f"{name}.2.3", 192, 224, (1, 7), side)
        net.conv(f"{name}.2.4", 224, 224, (7, 1), side)
        net.conv(f"{name}.2.5", 224, 256, (1, 7), side)
        net.conv(f"{name}.3", 1024, 128, 1, side)
    net.conv("reduce_b.0.1", 1024, 192, 1, 17)
    net.conv("reduce_b.0.2", 192, 192, 3, 8)
    net.conv("reduce_b.1.1", 1024, 256, 1, 17)
    net.conv("reduce_b.1.2", 256, 256, (1, 7), 17)
    net.conv("reduce_b.1.3", 256, 320, (7, 1), 17)
    net.conv("reduce_b.1.4", 320, 320, 3, 8)
    for block in range(3):
        name, side = f"c{block + 1}", 8
        net.conv(f"{name}.0", 1536, 256, 1, side)
        net.conv(f"{name}.1.0", 1536, 384, 1, side)
        net.conv(f"{name}.1.1a", 384, 256, (1, 3), side)
        net.conv(f"{name}.1.1b", 384, 256, (3, 1), side)
        net.conv(f"{name}.2.0", 1536, 384, 1, side)
        net.conv(f"{name}.2.1", 384, 448, (3, 1), side)
        net.conv(f"{name}.2.2", 448, 512, (1, 3), side)
        net.conv(f"{name}.2.3a", 512, 256, (1, 3), side)
        net.conv(f"{name}.2.3b", 512, 256, (3, 1), side)
        net.conv(f"{name}.3", 1536, 256, 1, side)
    net.linear("fc", 1536, 1000)
    return net.tensors


# (1×1, 3×3 reduce, 3×3, 5×5 reduce, 5×5, pool projection) of each inception module, with its input and side.
_GOOGLENET = {
    "3a": (192, 28, (64, 96, 128, 16, 32, 32)),
    "3b": (256, 28, (128, 128, 192, 32, 96, 64)),
    "4a": (480, 14, (192, 96, 208, 16, 48, 64)),
    "4b": (512, 14, (160, 112, 224, 24, 64, 64)),
    "4c": (512, 14, (128, 128, 256, 24, 64, 64)),
    "4d": (512, 14, (112, 144, 288, 32, 64, 64)),
    "4e": (528, 14, (256, 160, 320, 32, 128, 128)),
    "5a": (832, 7, (256, 160, 320, 32, 128, 128)),
    "5b": (832, 7, (384, 192, 384, 48, 128, 128)),
}


def googlenet() -> list[Tensor]:
    """GoogLeNet (Szegedy et al., 2014) with both auxiliary heads, no batch norm, on 224 × 224 images."""
    net = Layers()

    def conv(name: str, inputs: int, outputs: int, kernel: int, side: int) -> None:
        net.conv(name, inputs, outputs, kernel, side, bias=True, norm=False)

    conv("conv1", 3, 64, 7, 112)
    conv("conv2.reduce", 64, 64, 1, 56)
    conv("conv2", 64, 192, 3, 56)
    for name, (inputs, side, (one, reduce3, three, reduce5, five, pool)) in _GOOGLENET.items():
        conv(f"{name}.1x1", inputs, one, 1, side)
        conv(f"{name}.3x3.reduce", inputs, reduce3, 1, side)
        conv(f"{name}.3x3", reduce3, three, 3, side)
        conv(f"{name}.5x5.reduce", inputs, reduce5, 1, side)
        conv(f"{name}.5x5", reduce5, five, 5, side)
        conv(f"{name}.pool", inputs, pool, 1, side)
        if name in ("4a", "4d"):
            conv(f"aux.{name}.conv", one + three + five + pool, 128, 1, 4)
            net.linear(f"aux.{name}.fc", 2048, 1024)
            net.linear(f"aux.{name}.classifier", 1024, 1000)
    net.linear("classifier", 1024, 1000)
    return net.tensors


def bert_base(tokens: int = 128) -> list[Tensor]:
    """BERT-Base with its two pre-training heads, the decoder tied to the embeddings."""
    width, inner, vocabulary, net = 768, 3072, 30522, Layers()
    for name, rows in (("word", vocabulary), ("position", 512), ("type", 2)):
        net.tensors.append(Tensor(f"embeddings.{name}.weight", rows * width, 0.0))
    net.norm("embeddings.norm", width)
    for layer in range(12):
        name = f"layer.{layer}"
        for part in ("query", "key", "value", "output"):
            net.linear(f"{name}.attention.{part}", width, width, tokens)
        net.norm(f"{name}.attention.norm", width)
        net.linear(f"{name}.intermediate", width, inner, tokens)
        net.linear(f"{name}.output", inner, width, tokens)
        net.norm(f"{name}.norm", width)
    net.linear("pooler", width, width)
    net.linear("mlm.transform", width, width, tokens)
    net.norm("mlm.norm", width)
    # The tied decoder multiplies by the word embeddings: its work stands here, its bytes with them.
    net.tensors.append(Tensor("mlm.decoder.bias", vocabulary, float(vocabulary * width * tokens)))
    net.linear("nsp", width, 2)
    return net.tensors


MODELS: dict[str, Callable[[], list[Tensor]]] = {
    "ResNet-50": lambda: resnet((3, 4, 6, 3)),
    "ResNet-152": lambda: resnet((3, 8, 36, 3)),
    "DenseNet-201": lambda: densenet((6, 12, 48, 32)),
    "Inception-v4": inception_v4,
    "GoogLeNet": googlenet,
    "BERT-Base": bert_base,
}


def analytic_profile(model: str, compute_s: float, batch_size: int = 1, spread: Spread = "flops") -> Profile:
    """A profile with the model's real sizes and *assumed* times: a third of `compute_s` forward, the rest backward.

    Backward is spread over the layers in proportion to their multiply-adds (`flops`), or evenly over the parameters
    (`uniform`). Neither was measured.
    """
    backward = list(reversed(_by_layer(MODELS[model]())))
    backward_s = compute_s * (1 - FORWARD_SHARE)
    weights = [sum(tensor.multiply_adds for tensor in layer) if spread == "flops" else len(layer) for layer in backward]
    total = math.fsum(weights)
    gradients: list[Gradient] = []
    done = 0.0
    for layer, weight in zip(backward, weights, strict=True):
        done += weight
        ready = min(done / total, 1.0) * backward_s
        gradients += [
            Gradient(name=tensor.name, bytes=BYTES_PER_ELEMENT * tensor.elements, ready_s=ready)
            for tensor in reversed(layer)
        ]
    return Profile(
        name=f"{model.lower()}-analytic-{spread}",
        model=model,
        batch_size=batch_size,
        precision="fp32",
        device="assumed",
        forward_s=compute_s * FORWARD_SHARE,
        backward_s=backward_s,
        update_s=0.0,
        gradients=tuple(gradients),
        source=Source(
            method="analytic",
            reference=f"shapes of the published architecture; compute time as published, a third of it forward; "
            f"backward spread over layers by {'multiply-adds' if spread == 'flops' else 'number of parameters'}",
        ),
    )


def _by_layer(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Parameters of one layer become ready together: a weight with its bias."""
    layers: list[list[Tensor]] = []
    for tensor in tensors:
        owner = tensor.name.rpartition(".")[0]
        if layers and layers[-1][0].name.rpartition(".")[0] == owner:
            layers[-1].append(tensor)
        else:
            layers.append([tensor])
    return layers

"""Image networks: convolutions with skips, sums and concatenations."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scheduler.errors import InvalidOptionError
from scheduler.graph import Graph
from scheduler.zoo.tape import Tape, check_sizes

MOBILENET_V2 = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""(expansion, channels, blocks, stride) of each stage: Table 2 of Sandler et al. 2018."""


def resnet(
    blocks: Sequence[int] = (3, 4, 6, 3),
    *,
    width: int = 64,
    size: int = 224,
    batch_size: int = 1,
    classes: int = 1000,
    backward: bool = True,
) -> Graph:
    """Return a ResNet of bottleneck blocks; by default ResNet-50.

    Parameters
    ----------
    blocks : sequence of int
        Blocks of each stage; a stage has twice the channels of the one before and, except the
        first, half its height and width.
    width : int
        Channels inside the blocks of the first stage; blocks return four times as many.
    size : int
        Height and width of the images.
    batch_size, classes : int
    backward : bool
        Whether the graph is the whole step, or its forward alone.

    Raises
    ------
    InvalidOptionError
        If a size is below 1.

    References
    ----------
    He et al., Deep Residual Learning for Image Recognition, CVPR 2016.
    """
    check_sizes(stages=len(blocks), **_numbered("blocks", blocks))
    tape, x = _images(batch_size, size, width=width, classes=classes)
    tape.scope = "stem"
    x = _pool(tape, _convolve(tape, x, width, kernel=7, stride=2), stride=2)
    for stage, count in enumerate(blocks):
        for block in range(count):
            tape.scope = f"stage{stage}.block{block}"
            stride = 2 if stage and not block else 1
            inner = width * 2**stage
            y = _convolve(tape, x, inner, kernel=1)
            y = _convolve(tape, y, inner, stride=stride)
            y = _convolve(tape, y, 4 * inner, kernel=1, activate=False)
            if not block:
                x = _convolve(tape, x, 4 * inner, kernel=1, stride=stride, activate=False)
            x = _activate(tape, tape.add(y, x))
    return _classified(tape, x, classes, "resnet", backward)


def mobilenet(
    *,
    width: float = 1.0,
    size: int = 224,
    batch_size: int = 1,
    classes: int = 1000,
    settings: Sequence[tuple[int, int, int, int]] = MOBILENET_V2,
    backward: bool = True,
) -> Graph:
    """Return a MobileNetV2: inverted residual blocks around depthwise convolutions.

    Parameters
    ----------
    width : float
        Multiplies all channels.
    size : int
        Height and width of the images.
    batch_size, classes : int
    settings : sequence of (expansion, channels, blocks, stride)
        Of each stage, by default as in Table 2 of the paper; the stride is that of its first block.
    backward : bool
        Whether the graph is the whole step, or its forward alone.

    Raises
    ------
    InvalidOptionError
        If a size is below 1, or the width is not above 0.

    References
    ----------
    Sandler et al., MobileNetV2: Inverted Residuals and Linear Bottlenecks, CVPR 2018.
    """
    if not 0 < width < math.inf:
        raise InvalidOptionError(f"width, which multiplies the channels, must be a number above 0, got {width!r}")
    check_sizes(stages=len(settings), **_numbered("settings", [min(setting) for setting in settings]))
    tape, x = _images(batch_size, size, classes=classes)

    def scaled(channels: int) -> int:
        return max(1, round(channels * width))

    tape.scope = "stem"
    x = _convolve(tape, x, scaled(32), stride=2)
    for stage, (expansion, channels, count, first_stride) in enumerate(settings):
        for block in range(count):
            tape.scope = f"stage{stage}.block{block}"
            stride = 1 if block else first_stride
            source, inner = x, expansion * tape.shapes[x][1]
            if expansion > 1:
                x = _convolve(tape, x, inner, kernel=1)
            x = _convolve(tape, x, inner, stride=stride, groups=inner)
            x = _convolve(tape, x, scaled(channels), kernel=1, activate=False)
            if tape.shapes[x] == tape.shapes[source]:
                x = tape.add(x, source)
    tape.scope = "last"
    x = _convolve(tape, x, scaled(1280), kernel=1)
    return _classified(tape, x, classes, "mobilenet", backward)


def densenet(
    blocks: Sequence[int] = (6, 12, 24, 16),
    *,
    growth: int = 32,
    size: int = 224,
    batch_size: int = 1,
    classes: int = 1000,
    backward: bool = True,
) -> Graph:
    """Return a DenseNet: each layer reads the outputs of all layers before it; by default DenseNet-121.

    Parameters
    ----------
    blocks : sequence of int
        Layers of each dense block.
    growth : int
        Channels that each layer adds.
    size : int
        Height and width of the images.
    batch_size, classes : int
    backward : bool
        Whether the graph is the whole step, or its forward alone.

    Raises
    ------
    InvalidOptionError
        If a size is below 1.

    References
    ----------
    Huang et al., Densely Connected Convolutional Networks, CVPR 2017.
    """
    check_sizes(stages=len(blocks), **_numbered("blocks", blocks))
    tape, x = _images(batch_size, size, growth=growth, classes=classes)
    tape.scope = "stem"
    x = _pool(tape, _convolve(tape, x, 2 * growth, kernel=7, stride=2), stride=2)
    for block, layers in enumerate(blocks):
        features = [x]
        for layer in range(layers):
            tape.scope = f"block{block}.layer{layer}"
            y = tape.concatenate(features, axis=1) if layer else x
            y = _activate(tape, _normalize(tape, y))
            y = _convolve(tape, y, 4 * growth, kernel=1)
            features.append(_convolution(tape, y, growth))
        tape.scope = f"transition{block}"
        x = _activate(tape, _normalize(tape, tape.concatenate(features, axis=1)))
        if block < len(blocks) - 1:
            x = _pool(tape, _convolution(tape, x, max(1, tape.shapes[x][1] // 2), kernel=1), stride=2)
    return _classified(tape, x, classes, "densenet", backward)


def unet(
    depth: int = 4,
    *,
    width: int = 64,
    size: int = 256,
    batch_size: int = 1,
    classes: int = 2,
    backward: bool = True,
) -> Graph:
    """Return a U-Net: the output of each level on the way down is read again on the way up.

    Parameters
    ----------
    depth : int
        How many times the way down halves height and width and doubles the channels.
    width : int
        Channels of the first level.
    size : int
        Height and width of the images, a multiple of 2^depth.
    batch_size, classes : int
        Each pixel belongs to one of the classes.
    backward : bool
        Whether the graph is the whole step, or its forward alone.

    Raises
    ------
    InvalidOptionError
        If a size is below 1, or the images cannot be halved that often.

    References
    ----------
    Ronneberger et al., U-Net: Convolutional Networks for Biomedical Image Segmentation,
    MICCAI 2015; here with padded convolutions.
    """
    check_sizes(depth=depth)
    if size % 2**depth:
        raise InvalidOptionError(f"size must be a multiple of 2^depth = {2**depth}, got {size}")
    tape, x = _images(batch_size, size, width=width, classes=classes)
    skips: list[str] = []
    for level in range(depth + 1):
        tape.scope = f"down{level}"
        x = _pool(tape, x, stride=2) if level else x
        for _ in range(2):
            x = _convolve(tape, x, width * 2**level)
        skips.append(x)
    for level in reversed(range(depth)):
        tape.scope = f"up{level}"
        x = tape.concatenate([skips[level], _enlarge(tape, x, width * 2**level)], axis=1)
        for _ in range(2):
            x = _convolve(tape, x, width * 2**level)
    tape.scope = "head"
    logits = _convolution(tape, x, classes, kernel=1)
    labels = tape.batch("labels", (batch_size, size, size))
    return tape.graph(tape.run("loss", [logits, labels], ()), f"unet_{depth}", backward=backward)


def _images(batch_size: int, size: int, **others: int) -> tuple[Tape, str]:
    check_sizes(batch_size=batch_size, size=size, **others)
    tape = Tape()
    return tape, tape.batch("images", (batch_size, 3, size, size))


def _numbered(name: str, sizes: Sequence[int]) -> dict[str, int]:
    return {f"{name}[{i}]": size for i, size in enumerate(sizes)}


def _convolution(tape: Tape, x: str, channels: int, *, kernel: int = 3, stride: int = 1, groups: int = 1) -> str:
    batch, before, height, width = tape.shapes[x]
    shape = (batch, channels, math.ceil(height / stride), math.ceil(width / stride))
    weights = kernel**2 * before // groups
    flops = 2 * math.prod(shape) * weights
    return tape.run("convolution", [x], shape, flops=flops, parameters=channels * weights)


def _normalize(tape: Tape, x: str) -> str:
    return tape.run("norm", [x], tape.shapes[x], parameters=2 * tape.shapes[x][1])


def _activate(tape: Tape, x: str) -> str:
    return tape.run("relu", [x], tape.shapes[x], keeps="output")


def _convolve(
    tape: Tape, x: str, channels: int, *, kernel: int = 3, stride: int = 1, groups: int = 1, activate: bool = True
) -> str:
    x = _normalize(tape, _convolution(tape, x, channels, kernel=kernel, stride=stride, groups=groups))
    return _activate(tape, x) if activate else x


def _pool(tape: Tape, x: str, *, stride: int) -> str:
    batch, channels, height, width = tape.shapes[x]
    return tape.run("pool", [x], (batch, channels, math.ceil(height / stride), math.ceil(width / stride)))


def _enlarge(tape: Tape, x: str, channels: int) -> str:
    """Double height and width by a transposed convolution with a 2 x 2 kernel."""
    batch, before, height, width = tape.shapes[x]
    shape = (batch, channels, 2 * height, 2 * width)
    flops = 2 * math.prod(shape) * before
    return tape.run("up-convolution", [x], shape, flops=flops, parameters=4 * before * channels)


def _classified(tape: Tape, x: str, classes: int, name: str, backward: bool) -> Graph:
    batch, channels, *_ = tape.shapes[x]
    tape.scope = "head"
    mean = tape.run("mean", [x], (batch, channels), keeps="nothing")
    flops, parameters = 2 * batch * channels * classes, (channels + 1) * classes
    logits = tape.run("linear", [mean], (batch, classes), flops=flops, parameters=parameters)
    labels = tape.batch("labels", (batch,))
    return tape.graph(tape.run("loss", [logits, labels], ()), name, backward=backward)

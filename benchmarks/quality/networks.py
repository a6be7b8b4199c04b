"""The networks of the paper's tables, and the ResNet-20 of two published sets of weights."""

from __future__ import annotations

from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn.functional import pad, relu


def describe_images(size: int, channels: int, mean: tuple[float, ...], std: tuple[float, ...]) -> dict[str, Any]:
    """The data configuration of a network in timm's names; images of the right size are not changed."""
    return {
        "input_size": (channels, size, size),
        "mean": mean,
        "std": std,
        "crop_pct": 1.0,
        "interpolation": "bilinear",
    }


IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
GRAY = ((0.5,), (0.5,))


class MLP(nn.Module):
    """2-MLP of the paper: 784 → hidden → classes, with a ReLU.

    Example:
        >>> MLP(hidden=8)(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(self, hidden: int = 4096, num_classes: int = 10) -> None:
        super().__init__()
        self.pretrained_cfg = describe_images(28, 1, *GRAY)
        self.hidden = nn.Linear(784, hidden)
        self.classifier = nn.Linear(hidden, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """One output per class."""
        return self.classifier(relu(self.hidden(images.flatten(1))))


class Conv8(nn.Module):
    """Conv8 of the paper, all widths multiplied by a factor.

    The table's Conv(512, 512) on a 1 × 1 map before Linear(512, 256) is taken literally: nine convolutions.
    Weights are drawn as in He et al. (2015) for ReLU: torch's own default is smaller by √6 in each of twelve layers,
    and without BatchNorm the outputs would not depend on the image.

    Example:
        >>> Conv8(width=0.25)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    PLAN = (64, 64, 2, 128, 128, 2, 256, 256, 2, 512, 512, 4, 512)
    """Output channels of a 3 × 3 convolution, or the size of a pooling."""

    def __init__(self, width: float = 1.0, num_classes: int = 10) -> None:
        super().__init__()
        self.pretrained_cfg = describe_images(32, 3, *IMAGENET)
        layers: list[nn.Module] = []
        inputs = 3
        for number in self.PLAN:
            if number < 10:
                layers.append(nn.MaxPool2d(number))
                continue
            outputs = round(number * width)
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
            inputs = outputs
        between = round(256 * width)
        self.features = nn.Sequential(*layers)
        self.linear1 = nn.Linear(inputs, between)
        self.linear2 = nn.Linear(between, between)
        self.classifier = nn.Linear(between, num_classes)
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)) and module is not self.classifier:
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """One output per class."""
        features = self.features(images).flatten(1)
        return self.classifier(relu(self.linear2(relu(self.linear1(features)))))


class Block(nn.Module):
    """Two convolutions and a shortcut without parameters: every second pixel, padded with zero channels (option A)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.more = stride, (outputs - inputs) // 2

    def forward(self, images: Tensor) -> Tensor:
        """The block's output."""
        shortcut = images
        if self.stride > 1 or self.more:
            shortcut = pad(images[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.more, self.more))
        return relu(self.bn2(self.conv2(relu(self.bn1(self.conv1(images))))) + shortcut)


class ResNet20(nn.Module):
    """ResNet-20 for CIFAR (He et al., 2016), with the names of its best-known implementations.

    Example:
        >>> sum(parameter.numel() for parameter in ResNet20().parameters())
        269722
    """

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.pretrained_cfg = describe_images(32, 3, *IMAGENET)
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = self._stage(16, 16, 1)
        self.layer2 = self._stage(16, 32, 2)
        self.layer3 = self._stage(32, 64, 2)
        self.linear = nn.Linear(64, num_classes)

    def _stage(self, inputs: int, outputs: int, stride: int) -> nn.Sequential:
        first = Block(inputs, outputs, stride)
        return nn.Sequential(first, Block(outputs, outputs, 1), Block(outputs, outputs, 1))

    def forward(self, images: Tensor) -> Tensor:
        """One output per class."""
        features = self.layer3(self.layer2(self.layer1(relu(self.bn1(self.conv1(images))))))
        return self.linear(features.mean((2, 3)))


def small_vit(num_classes: int = 10) -> nn.Module:
    """timm's `test_vit` (six blocks, two heads of 32) for gray images of 28 × 28 pixels in patches of 4.

    Example:
        >>> small_vit(6)(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 6])
    """
    images = describe_images(28, 1, *GRAY)
    model: nn.Module = timm.create_model(
        "test_vit", img_size=28, patch_size=4, in_chans=1, num_classes=num_classes, pretrained_cfg_overlay=images
    )
    return model


def mobilenet(num_classes: int = 1000) -> nn.Module:
    """timm's `mobilenetv2_100`, which accepts images of any size; here 96 × 96 pixels.

    Example:
        >>> mobilenet(5).num_classes
        5
    """
    images = {"input_size": (3, 96, 96), "crop_pct": 1.0}
    model: nn.Module = timm.create_model("mobilenetv2_100", num_classes=num_classes, pretrained_cfg_overlay=images)
    return model


def seeded(make: Any, seed: int) -> nn.Module:
    """A network with random weights that depend only on the seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network: nn.Module = make()
    return network

"""ResNet-50, ViT-Ti and U-Nets in PyTorch: functions of images, and of weights named as in Tekso.

Sources: He et al. 2016, "Deep residual learning for image recognition"; Dosovitskiy et al. 2021,
"An image is worth 16x16 words"; Ronneberger et al. 2015, "U-Net"; Çiçek et al. 2016, "3D U-Net".

Legend: B batch, T tokens, N heads, H size of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  its usual name


class Network:
    """Layers whose weights are found by path.

    Args:
      weights: {path: tensor}; kernels are [*spatial, inputs, outputs].
      training: whether normalisations use the statistics of the batch.
    """

    def __init__(self, weights: Mapping[str, Any], *, training: bool) -> None:
        self.weights, self.training = weights, training

    def conv(self, path: str, x: Any, stride: int = 1, padding: int = 0) -> Any:
        """Returns a convolution with a bias, if there is one."""
        w = self.weights[f"{path}/w"]
        rank = w.ndim - 2
        convolve = F.conv2d if rank == 2 else F.conv3d
        w = w.permute(rank + 1, rank, *range(rank))
        return convolve(x, w, self.weights.get(f"{path}/b"), stride, padding)

    def doubled(self, path: str, x: Any) -> Any:
        """Returns a transposed convolution that doubles every spatial dim."""
        w = self.weights[f"{path}/w"]
        rank = w.ndim - 2
        convolve = F.conv_transpose2d if rank == 2 else F.conv_transpose3d
        return convolve(
            x, w.permute(rank, rank + 1, *range(rank)), self.weights.get(f"{path}/b"), 2
        )

    def conv_norm(self, path: str, x: Any, stride: int = 1) -> Any:
        """Returns a normalised convolution, padded for ceil(size / stride) outputs."""
        x = self.conv(f"{path}/conv", x, stride, self.weights[f"{path}/conv/w"].shape[0] // 2)
        names = ("moving_mean", "moving_variance", "scale", "bias")
        mean, variance, scale, bias = (self.weights[f"{path}/norm/{name}"] for name in names)
        if self.training:
            return F.batch_norm(x, None, None, scale, bias, training=True, eps=1e-5)
        return F.batch_norm(x, mean.detach(), variance.detach(), scale, bias, eps=1e-5)

    def layer_norm(self, path: str, x: Any) -> Any:
        """Returns x, normalised over its last dim."""
        scale, bias = self.weights[f"{path}/scale"], self.weights[f"{path}/bias"]
        return F.layer_norm(x, scale.shape, scale, bias, 1e-6)

    def linear(self, path: str, x: Any) -> Any:
        """Returns x w + b."""
        return x @ self.weights[f"{path}/w"] + self.weights[f"{path}/b"]

    def residual(self, path: str, x: Any, strides: Sequence[int], *, projects: bool) -> Any:
        """Returns a residual block: convolutions, the sum with x or its projection, and ReLU."""
        y = x
        for i, stride in enumerate(strides):
            y = self.conv_norm(f"{path}/convs/{i}", F.relu(y) if i else y, stride)
        if projects:
            x = self.conv_norm(f"{path}/shortcut", x, max(strides))
        return F.relu(x + y)

    def stem(self, x: Any) -> Any:
        """Returns the first layer of residual networks."""
        return F.max_pool2d(F.relu(self.conv_norm("stem/conv", x, 2)), 3, 2, 1)


def resnet50(net: Network, x: Any) -> Any:
    """Returns logits; the 3x3 convolutions have the strides (v1.5)."""
    x, number = net.stem(x), 0
    for group, count in enumerate((3, 4, 6, 3)):
        for i in range(count):
            stride = 2 if group > 0 and i == 0 else 1
            x = net.residual(f"blocks/{number}", x, (1, stride, 1), projects=i == 0)
            number += 1
    return net.linear("classifier", x.mean((2, 3)))


def vit_ti(net: Network, x: Any) -> Any:
    """Returns logits of the class token, after 12 layers with normalised inputs."""
    x = net.conv("patches/projection", x, 16).flatten(2).transpose(1, 2)
    token = net.weights["class_token/w"].expand(x.shape[0], 1, -1)
    x = torch.cat([token, x], 1) + net.weights["positions/w"]
    for i in range(12):
        path = f"stack/layers/{i}"
        x = x + _attention(net, f"{path}/attention", net.layer_norm(f"{path}/attention_norm", x))
        y = net.layer_norm(f"{path}/feed_forward_norm", x)
        y = F.gelu(net.linear(f"{path}/feed_forward/hidden", y))
        x = x + net.linear(f"{path}/feed_forward/output", y)
    return net.linear("classifier", net.layer_norm("final_norm", x)[:, 0])


def _attention(net: Network, path: str, x: Any) -> Any:
    w = net.weights
    q, k, v = (
        (torch.einsum("btd,dnh->btnh", x, w[f"{path}/{n}"]) + w[f"{path}/{n}_bias"]).transpose(1, 2)
        for n in ("q", "k", "v")
    )
    scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
    y = (torch.softmax(scores, 3) @ v).transpose(1, 2)
    return torch.einsum("btnh,nhd->btd", y, w[f"{path}/out"]) + w[f"{path}/out_bias"]


def unet(net: Network, x: Any) -> Any:
    """Returns logits of every pixel; the image is halved four times."""
    return _unet(net, x, 4, F.max_pool2d)


def unet3d(net: Network, x: Any) -> Any:
    """Returns logits of every voxel; the volume is halved three times."""
    return _unet(net, x, 3, F.max_pool3d)


def _unet(net: Network, x: Any, num_scales: int, pool: Any) -> Any:
    def convs(path: str, x: Any) -> Any:
        for i in range(2):
            x = F.relu(net.conv_norm(f"{path}/layers/{i}", x))
        return x

    skips = []
    for i in range(num_scales):
        skips.append(convs(f"down/{i}", x))
        x = pool(skips[-1], 2)
    x = convs(f"down/{num_scales}", x)
    for i in range(num_scales):
        x = torch.cat([skips.pop(), net.doubled(f"up/{i}", x)], 1)
        x = convs(f"merge/{i}", x)
    return net.conv("classifier", x)

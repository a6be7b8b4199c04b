"""Models get the same pixels as from timm."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

import hf_retarget as rt
from hf_retarget.data import Preprocess, choose_preprocess, load_data
from hf_retarget.errors import DataError, RetargetError
from hf_retarget.models import load_checkpoint
from hf_retarget.recipe import DataOptions


@pytest.fixture
def photo():
    values = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    return Image.fromarray(values)


def apply(preprocess, image, augment=False):
    return preprocess.normalise(preprocess.shape(augment)(image))


@pytest.mark.parametrize("crop_mode", ["center", "squash", "border"])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_pixels_equal_those_of_timm(photo, crop_mode, interpolation):
    from timm.data import create_transform

    config = {"crop_mode": crop_mode, "interpolation": interpolation, "crop_pct": 0.9, "mean": (0.4, 0.5, 0.6)}
    expected = create_transform((3, 32, 32), std=(0.229, 0.224, 0.225), **config)(photo)
    found = apply(Preprocess.of({**config, "input_size": [3, 32, 32]}), photo)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("crop_pct", [1.0, 0.95, 0.5])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("height", [28, 8])  # 8 / 0.95 is cut to 8, but 32 / 0.95 to 33
def test_images_of_the_right_size_equal_those_of_timm(photo, crop_pct, channels, height):
    from timm.data import create_transform

    statistics = {"mean": (0.4,) * channels, "std": (0.3,) * channels, "interpolation": "bicubic"}
    small = photo.resize((32, height)).convert("RGB" if channels == 3 else "L")
    expected = create_transform((channels, height, 32), crop_pct=crop_pct, **statistics)(small)
    found = apply(Preprocess((channels, height, 32), **statistics, crop_pct=crop_pct), small)
    assert torch.equal(found, expected)


def test_a_batch_is_normalised_like_single_images(photo):
    preprocess = Preprocess(input_size=(3, 32, 32))
    pixels = torch.stack([preprocess.shape()(photo)] * 3)
    assert torch.equal(preprocess.normalise(pixels)[2], apply(preprocess, photo))


def test_timm_pretrained_cfg_is_read():
    import timm

    config = timm.create_model("test_vit").pretrained_cfg
    preprocess = Preprocess.of(config)
    resolved = timm.data.resolve_data_config(pretrained_cfg=config)
    assert preprocess.input_size == resolved["input_size"]
    assert preprocess.mean == resolved["mean"]
    assert preprocess.std == resolved["std"]
    assert preprocess.interpolation == resolved["interpolation"]
    assert preprocess.crop_pct == resolved["crop_pct"]
    assert preprocess.crop_mode == resolved["crop_mode"]


def test_image_size_and_channels_override_the_config():
    preprocess = Preprocess.of({"input_size": (3, 224, 224), "mean": (0.3, 0.4, 0.5)}, image_size=28, in_chans=1)
    assert preprocess.input_size == (1, 28, 28)
    assert preprocess.mean == pytest.approx((0.4,))
    assert len(preprocess.std) == 1


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "CMYK", "LA"])
@pytest.mark.parametrize("channels", [1, 3])
def test_gray_and_colour_images_are_converted(mode, channels):
    preprocess = Preprocess.of({}, image_size=8, in_chans=channels)
    assert apply(preprocess, Image.new(mode, (10, 10))).shape == (channels, 8, 8)


def test_sixteen_bit_images_are_scaled():
    deep = Image.fromarray(np.full((8, 8), 128 * 256, np.uint16))
    preprocess = Preprocess(input_size=(1, 8, 8), mean=(0.0,), std=(1.0,), crop_pct=1.0)
    assert apply(preprocess, deep).mean() == pytest.approx(128 / 255, abs=0.01)


def test_augmentation_changes_images(photo):
    preprocess = Preprocess(input_size=(3, 32, 32))
    one, other = (apply(preprocess, photo, augment=True) for _ in range(2))
    assert one.shape == (3, 32, 32)
    assert not torch.equal(one, other)


def test_invalid_configurations_are_refused():
    with pytest.raises(DataError, match="5 channels"):
        Preprocess.of({"input_size": (5, 8, 8)})
    with pytest.raises(DataError, match="image_size is 0"):
        Preprocess.of({}, image_size=0)


# ---- models without a configuration, and what a user asks for


class Small(torch.nn.Module):
    """A network of no library."""

    def __init__(self, width: int = 16 * 16) -> None:
        super().__init__()
        self.first, self.head = torch.nn.Linear(width, 8), torch.nn.Linear(8, 3)

    def forward(self, inputs):
        self.seen = inputs
        return self.head(self.first(inputs.flatten(1)).relu())


def pairs(shape, count=60, low=0.0, high=1.0):
    values = torch.rand(count, *shape, generator=torch.Generator().manual_seed(0)) * (high - low) + low
    return [(each, number % 3) for number, each in enumerate(values)]


@pytest.mark.parametrize(
    ("shape", "low", "high"),
    [((1, 16, 16), 0.0, 1.0), ((1, 16, 16), -2.0, 2.0), ((256,), -2.0, 2.0)],
    ids=["images", "normalised", "vectors"],
)
def test_a_plain_module_gets_tensors_unchanged(shape, low, high):
    model, items = Small(), pairs(shape, low=low, high=high)
    found = rt.evaluate(model, items, split="train")
    size = "×".join(map(str, shape))
    assert f"images: tensors of {size}, as they are" in found.notes
    expected = [int(model(torch.stack([image])).argmax()) for image, _ in items]
    preprocess = choose_preprocess(load_checkpoint(model))
    data = load_data(items, DataOptions(), preprocess)
    inputs = torch.cat([batch for batch, _ in data.train.batches(16)])
    assert torch.equal(inputs, torch.stack([items[int(each)][0] for each in data.train.indices]))
    assert found.score.predictions == tuple(expected[int(each)] for each in data.train.indices)


@pytest.mark.parametrize("how", ["function", "configuration", "file"])
def test_a_requested_preprocessing_takes_precedence(how, tmp_path):
    config = {"input_size": [1, 16, 16], "mean": [0.5], "std": [0.5], "crop_pct": 1.0}
    path = tmp_path / "data.json"
    path.write_text(json.dumps({"pretrained_cfg": config}))
    asked = {"function": lambda image: 2 * image - 1, "configuration": config, "file": str(path)}[how]
    preprocess = choose_preprocess(load_checkpoint(Small()), None, asked)
    data = load_data(pairs((1, 16, 16)), DataOptions(), preprocess)
    inputs, _ = next(data.train.batches(8))
    given = torch.stack([pairs((1, 16, 16))[int(each)][0] for each in data.train.indices[:8]])
    assert torch.allclose(inputs, 2 * given - 1, atol=0.005)
    assert rt.evaluate(Small(), pairs((1, 16, 16)), preprocess=asked).score.count == 60


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("nosuch.json", "pass none, or a JSON file"),
        ({"colour": 1}, "none of timm's"),
        ({"mean": ["a"]}, "a list of numbers"),
        (lambda image: "text", "must return a tensor"),
    ],
)
def test_invalid_preprocessing_is_refused(asked, words):
    with pytest.raises(RetargetError, match=words):
        rt.evaluate(Small(), pairs((1, 16, 16)), preprocess=asked)


def test_images_of_different_sizes_cannot_be_used_unchanged():
    items = [*pairs((1, 16, 16)), *pairs((1, 12, 16))]
    with pytest.raises(DataError, match=r"sizes, 1×12×16 and 1×16×16.*--preprocess"):
        rt.evaluate(Small(), items, split="train")


def test_a_module_for_vectors_is_saved_and_reloaded(tmp_path):
    torch.manual_seed(0)
    models = [Small(), Small(), Small()]
    overrides = {"port.steps": 2, "port.grad_batches": 1, "port.batch_size": 16, "port.control": "none"}
    items = pairs((256,), 90, -2, 2)
    result = rt.port(*models, items, overrides=overrides, out=tmp_path / "ported")
    again = rt.evaluate(tmp_path / "ported", items, arch=f"{__name__}:Small")
    assert again.score.count == 90
    assert sorted(result.weights) == sorted(Small().state_dict())


def test_a_port_of_plain_modules_describes_the_preprocessing():
    torch.manual_seed(0)
    models = [Small(), Small(), Small()]
    overrides = {"port.steps": 2, "port.grad_batches": 1, "port.batch_size": 16, "port.control": "none"}
    result = rt.port(*models, pairs((1, 16, 16), 90, -2, 2), overrides=overrides)
    assert result.document.data.preprocess == {"input_size": [1, 16, 16], "transform": "none"}
    assert "images: tensors of 1×16×16, as they are" in result.document.notes

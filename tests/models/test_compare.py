"""Three checkpoints fit together, or the first difference is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import timm
import torch
from torch import nn

from hf_retarget.errors import ModelError
from hf_retarget.models import compare_checkpoints, head_names, load_checkpoint


def of_timm(name, **options):
    return load_checkpoint(timm.create_model(name, **options))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("test_resnet", ("fc.weight", "fc.bias")),
        ("test_vit", ("head.weight", "head.bias")),
        ("test_efficientnet", ("classifier.weight", "classifier.bias")),
    ],
)
def test_heads_of_different_sizes_are_not_a_difference(name, expected):
    base, tuned = of_timm(name, num_classes=5), of_timm(name, num_classes=3)
    found = compare_checkpoints(base, tuned, base)
    assert (found.head, found.labels_agree, found.notes) == (expected, None, ())


def test_a_base_without_a_classifier():
    base, tuned = of_timm("test_vit", num_classes=0), of_timm("test_vit", num_classes=3)
    assert compare_checkpoints(base, tuned, base).head == ("head.weight", "head.bias")
    with pytest.raises(ModelError, match="has no classifier"):
        compare_checkpoints(tuned, base, tuned)


def test_a_tuned_model_without_a_known_classifier_is_refused():
    class Headless(nn.Module):
        num_classes = 3

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(2, 3)

    checkpoint = load_checkpoint(Headless())
    with pytest.raises(ModelError, match="no head was found"):
        compare_checkpoints(checkpoint, checkpoint, checkpoint)


class Net(nn.Module):
    """A network whose classifier is neither last nor declared."""

    def __init__(self, classes: int, width: int = 4) -> None:
        super().__init__()
        self.top = nn.Linear(width, classes)
        self.bottom = nn.Linear(6, width)


class Announced(Net):
    def get_classifier(self):
        return self.top


def test_head_names_are_found_in_order_of_reliability():
    assert head_names(load_checkpoint(Net(3)), load_checkpoint(Net(5))) == ("top.weight", "top.bias")
    assert head_names(Net(3)) == ("bottom.weight", "bottom.bias")
    assert head_names(load_checkpoint(Announced(3))) == ("top.weight", "top.bias")
    several = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=3, depth=1)
    expected = ("head.weight", "head.bias", "head_dist.weight", "head_dist.bias")
    assert head_names(several) == head_names(load_checkpoint(several)) == expected


def test_another_architecture_is_refused():
    tuned, other = of_timm("test_resnet", num_classes=3), of_timm("test_vit", num_classes=3)
    message = r"the new base 'VisionTransformer' differ: one is 'test_resnet', the other 'test_vit': in the new"
    with pytest.raises(ModelError, match=message):
        compare_checkpoints(tuned, tuned, other)


def test_other_shapes_and_options_are_refused():
    with pytest.raises(ModelError, match=r"in the old base, .*bottom\.weight is \[5, 6\], not \[4, 6\]"):
        compare_checkpoints(*(load_checkpoint(Announced(3, width=width)) for width in (5, 4, 4)))
    gray, colour = of_timm("test_resnet", in_chans=1), of_timm("test_resnet")
    with pytest.raises(ModelError, match=r"'in_chans' is not set in one and 1 in the other \(in the new base, 1 "):
        compare_checkpoints(colour, colour, gray)
    dropping = replace(colour, options={"drop_path_rate": 0.1})
    assert compare_checkpoints(colour, dropping, colour).notes == ()


def test_labels():
    net = replace(of_timm("test_resnet", num_classes=2), labels=("a", "b"))
    other = replace(net, labels=("b", "a"))
    assert compare_checkpoints(net, net, net).labels_agree is True
    assert compare_checkpoints(net, net, other).labels_agree is False
    assert compare_checkpoints(net, net, replace(net, labels=None)).labels_agree is None
    with pytest.raises(ModelError, match="2 classes but 1 label names"):
        compare_checkpoints(net, replace(net, labels=("a",)), net)


def test_notes_and_the_image_size():
    tuned = of_timm("test_resnet", num_classes=3)
    half = replace(tuned, dtype=torch.float16, config={**tuned.config, "mean": (0.0,) * 3, "input_size": (3, 32, 32)})
    notes = compare_checkpoints(tuned, tuned, half).notes
    assert "new base float16" in notes[0]
    assert "images of 32×32" in notes[1]
    assert "mean (0.0, 0.0, 0.0) for the new base" in notes[2]
    fixed = {**tuned.config, "fixed_input_size": True}
    with pytest.raises(ModelError, match="the other of 32×32"):
        compare_checkpoints(tuned, replace(tuned, config=fixed), replace(half, config={**fixed, **half.config}))

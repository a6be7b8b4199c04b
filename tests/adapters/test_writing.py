"""Writing adapters: PEFT loads them, and they equal the port up to their rank."""

from __future__ import annotations

import json
import shutil
import sys

import peft
import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import hf_retarget as rt
from hf_retarget.adapters.reading import load_tuned
from hf_retarget.adapters.writing import compose_adapter
from hf_retarget.cli import main
from hf_retarget.document import read_document
from hf_retarget.errors import ModelError, PortError, RecipeError
from hf_retarget.models import head_names, load_checkpoint, save_model
from hf_retarget.recipe import PortOptions

SIZE = (3, 32, 32)
IMAGES = torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, *SIZE)
ALL = {"save_as": "lora", "energy": 1.0}


def move(base, classes: int = 3, besides: tuple[str, ...] = ()):
    """The base with another head and with changed weights and statistics, except for some."""
    torch.manual_seed(3)
    model = base.build(classes)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point() and not name.endswith(besides or ("-",)):
                tensor += 0.02 * torch.randn_like(tensor).abs()
    return model.eval()


def compose(base, model, **options):
    return compose_adapter(base, model.state_dict(), model, head_names(model), PortOptions(**ALL | options), SIZE)


def answers(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IMAGES)


@pytest.mark.parametrize("name", ["test_resnet", "test_efficientnet", "test_vit"])
def test_with_full_energy_the_adapter_equals_the_model(name, make, tmp_path):
    base = load_checkpoint(make(tmp_path / "new", name))
    model = move(base, besides=("pos_embed", "cls_token"))
    adapter = compose(base, model)
    assert (adapter.facts.left_out, round(adapter.facts.energy, 6)) == ({}, 1.0)
    torch.testing.assert_close(answers(adapter.load(base.build(3))), answers(model), rtol=1e-4, atol=1e-5)
    statistics = [key for key in adapter.weights if key.endswith("running_mean")]
    norms = [key for key in model.state_dict() if key.endswith("running_mean")]
    assert len(statistics) == len(norms), "all statistics are in it"
    grouped = [n for n, m in model.named_modules() if getattr(m, "groups", 1) > 1]
    assert set(grouped) <= set(adapter.config["modules_to_save"])
    assert bool(grouped) == (name == "test_efficientnet")
    factored = {key.partition(".lora_")[0] for key in adapter.weights if ".lora_" in key}
    assert not factored & {f"base_model.model.{each}" for each in adapter.facts.whole}, "a module is one or the other"
    # Our own reader accepts it.
    adapter.save(tmp_path)
    torch.testing.assert_close(answers(load_tuned(tmp_path, base).build()), answers(model), rtol=1e-4, atol=1e-5)


def test_ranks_are_clamped_and_the_energy_is_reported(make, tmp_path):
    base = load_checkpoint(make(tmp_path / "new", "test_resnet"))
    model = move(base)
    delta = {n: p.detach() - base.weights[n] for n, p in model.named_parameters() if not n.startswith("fc.")}
    total = sum(float(each.double().square().sum()) for each in delta.values())
    kept = []
    for rank in (2, 30):
        adapter = compose(base, model, energy=None, rank=rank)
        merged = adapter.load(base.build(3)).merge_and_unload().state_dict()
        lost = sum(float((merged[n] - model.state_dict()[n]).double().square().sum()) for n in delta)
        assert adapter.facts.energy == pytest.approx(1 - lost / total, abs=1e-5)
        kept.append(adapter.facts.energy)
        assert (adapter.config["r"], adapter.config["lora_alpha"]) == (rank, rank)
        ranks = {key: len(each) for key, each in adapter.weights.items() if "lora_A" in key}
        stem = ranks["base_model.model.conv1.0.lora_A.weight"]
        assert stem == min(rank, 16)
        clamped = {name.removeprefix("^") for name in adapter.config["rank_pattern"]}
        assert clamped == {
            key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            for key, each in ranks.items()
            if each < rank
        }
        assert adapter.config["alpha_pattern"] == adapter.config["rank_pattern"], "nothing is scaled"
    assert kept[0] < kept[1]


def test_each_layer_keeps_the_requested_share_of_energy(make, tmp_path):
    base = load_checkpoint(make(tmp_path / "new"))
    model = move(base, besides=("pos_embed", "cls_token"))
    adapter = compose(base, model, energy=0.9)
    merged = adapter.load(base.build(3)).merge_and_unload().state_dict()
    ours = model.state_dict()
    for name in adapter.config["target_modules"]:
        change = ours[f"{name}.weight"] - base.weights[f"{name}.weight"]
        lost = (merged[f"{name}.weight"] - ours[f"{name}.weight"]).square().sum() / change.square().sum()
        assert lost <= 0.1 + 1e-5
        rank = len(adapter.weights[f"base_model.model.{name}.lora_A.weight"])
        values = torch.linalg.svdvals(change.flatten(1)).square()
        assert values[: rank - 1].sum() < 0.9 * values.sum(), "no more directions than needed"
    assert 0.9 <= adapter.facts.energy < 1
    assert adapter.facts.size < compose(base, model).facts.size


def test_tensors_left_out_are_named_with_their_share(make, tmp_path):
    base = load_checkpoint(make(tmp_path / "new"))
    model = move(base)
    facts = compose(base, model).facts
    assert set(facts.left_out) == {"pos_embed", "cls_token"}
    assert facts.energy == pytest.approx(1 - sum(facts.left_out.values()), abs=1e-5)
    assert "left out, because PEFT cannot hold them: pos_embed (" in facts.sentence


def test_only_a_head(make, tmp_path):
    base = load_checkpoint(make(tmp_path / "new", "test_resnet"))
    model = base.build(3)
    adapter = compose(base, model)
    assert (adapter.facts.energy, adapter.facts.whole, adapter.facts.layers) == (1.0, ("fc",), 1)
    torch.testing.assert_close(answers(adapter.load(base.build(3, seed=5))), answers(model))


class Odd(torch.nn.Module):
    """Names with equal endings, a layer whose weight is used without calling it, and a dilated convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, bias=False)
        self.norm = torch.nn.BatchNorm2d(8)
        self.wide = torch.nn.Conv2d(8, 8, 3, dilation=2, bias=False)
        self.inner = torch.nn.ModuleDict(
            {"conv": torch.nn.Conv2d(8, 8, 3, groups=2, bias=False), "denorm": torch.nn.Conv2d(8, 8, 1, bias=False)}
        )
        self.used = torch.nn.Linear(8, 8, bias=False)
        self.fc = torch.nn.Linear(8, 3)
        self.num_classes = 3

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.inner["denorm"](self.inner["conv"](self.wide(self.norm(self.conv(images))))).mean((2, 3))
        return self.fc(torch.nn.functional.linear(x, self.used.weight))


def test_names_that_peft_confuses(tmp_path):
    torch.manual_seed(0)
    base = load_checkpoint(Odd().eval())
    unchanged = move(base, besides=("inner.conv.weight",))
    for model in (move(base), unchanged):
        adapter = compose(base, model)
        torch.testing.assert_close(answers(adapter.load(base.build(3))), answers(model), rtol=1e-4, atol=1e-5)
        assert adapter.config["target_modules"] == ["conv"]
        assert {"norm", "wide", "inner.denorm", "used", "fc"} <= set(adapter.facts.whole)
    assert adapter.config["exclude_modules"] == ["inner.conv"]


# ---- whole ports


@pytest.fixture(scope="module")
def ported(tmp_path_factory, make, adapt, colours, short):
    """An adapter, ported to a new base and saved as an adapter."""
    place = tmp_path_factory.mktemp("ported")
    make(place / "old")
    base = load_checkpoint(place / "old")
    adapt(place / "tuned", base)
    weights = {n: t + 0.003 * torch.randn_like(t) for n, t in base.weights.items()}
    shutil.copytree(place / "old", place / "new")
    save_file(weights, place / "new" / "model.safetensors")
    sides = [place / name for name in ("old", "tuned", "new")]
    options = short | {"port.save_as": "lora", "port.rank": 8}
    return rt.port(*sides, colours, overrides=options, out=place / "out", device="cpu"), place


def test_a_port_is_saved_as_an_adapter(ported):
    result, place = ported
    out, facts = place / "out", result.document.adapter
    assert {"adapter_config.json", "adapter_model.safetensors", "config.json"} <= {path.name for path in out.iterdir()}
    assert not (out / "model.safetensors").exists()
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["r"], config["lora_bias"]) == ("new", 8, True)
    assert (facts.rank, facts.left_out) == (8, {})
    assert facts.energy > 0.9999, "the fine-tuning has rank 8, and so has the port"
    base = load_checkpoint(place / "new")
    loaded = peft.PeftModel.from_pretrained(base.build(3), out)
    ((images, labels),) = result.inputs.data.test.batches(100)
    with torch.no_grad():
        said = loaded.eval()(images)
    assert facts.test.top1 == pytest.approx(float((said.argmax(1) == labels).float().mean()))
    assert facts.test.loss == pytest.approx(float(torch.nn.functional.cross_entropy(said, labels)), rel=1e-5)
    document = json.loads((out / "port.json").read_text())
    assert document["adapter"]["energy"] == facts.energy
    assert document["adapter"]["test"]["top1"] == facts.test.top1
    card, report = (out / "README.md").read_text(), (out / "report.html").read_text()
    for page in (card, report):
        assert "As an adapter of rank 8 (" in page
    assert "| the adapter, as PEFT loads it |" in card
    assert "library_name: peft" in card
    assert 'model = PeftModel.from_pretrained(base, "./").eval()' in card


def test_a_ported_adapter_can_be_ported_again(ported, make, colours, short, tmp_path):
    result, place = ported
    third = make(tmp_path / "third", seed=4)
    again = rt.port(place / "new", place / "out", third, colours, overrides=short, device="cpu")
    assert again.inputs.tuned.labels == result.inputs.labels, "config.json beside the adapter names them"
    assert not any("base" in note and "adapter" in note for note in again.document.notes)
    merged = load_tuned(place / "out", load_checkpoint(place / "new")).build()
    torch.testing.assert_close(answers(merged), answers(result.model), rtol=1e-3, atol=1e-4)


def test_the_terminal_reports_the_adapter_and_the_folder_is_pushed(ported, colours, short, connected, tmp_path):
    _, place = ported
    flags = ["--src-base", place / "old", "--src-ft", place / "tuned", "--new-base", place / "new", "--data", colours]
    flags += ["--data-image-size", 32, "--method", "naive", "--control", "none", "--steps", 1, "--no-verify"]
    flags += ["--save-as", "lora", "--energy", 0.9, "--samples", 0, "--device", "cpu", "--out", tmp_path / "out"]
    done = CliRunner().invoke(main, ["port", *map(str, flags), "--push-to-hub", "birds"])
    assert done.exit_code == 0, done.output
    assert "As an adapter of rank " in done.stdout
    assert "as PEFT loads it, it scores " in done.stdout
    assert "Next: " not in done.stderr, "an adapter cannot be fine-tuned on here"
    repository = connected.repository("ada/birds")
    assert {"adapter_config.json", "adapter_model.safetensors", "config.json"} <= set(repository.paths())
    card = repository.read("README.md").decode()
    assert 'PeftModel.from_pretrained(base, "ada/birds")' in card
    document = read_document(tmp_path / "out" / "port.json")
    assert 0.9 <= document.adapter.energy < 0.99
    assert document.adapter.test.loss != document.port.test.loss, "the loss of information is visible"
    refused = CliRunner().invoke(main, ["evaluate", str(tmp_path / "out"), "--data", str(colours)])
    assert refused.exit_code == 1
    assert "is an adapter, not a whole model" in refused.stderr


def test_a_transformers_model(tmp_path, colours, short):
    transformers.logging.set_verbosity_error()
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    labels = {"id2label": {0: "red", 1: "blue", 2: "green"}, "label2id": {"red": 0, "blue": 1, "green": 2}}
    for seed, (name, options) in enumerate({"old": {}, "new": {}, "tuned": labels}.items()):
        torch.manual_seed(seed % 2)
        config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, **options or {"num_labels": 5})
        transformers.ViTForImageClassification(config).save_pretrained(tmp_path / name)
    tensors = load_file(tmp_path / "tuned" / "model.safetensors")
    save_file({n: t + 0.01 for n, t in tensors.items()}, tmp_path / "tuned" / "model.safetensors", {"format": "pt"})
    sides = [tmp_path / name for name in ("old", "tuned", "new")]
    options = short | {"port.save_as": "lora", "port.energy": 1.0}
    result = rt.port(*sides, colours, overrides=options, out=tmp_path / "out", device="cpu")
    left_out = result.document.adapter.left_out
    assert set(left_out) == {"vit.embeddings.cls_token", "vit.embeddings.position_embeddings"}
    load = transformers.AutoModelForImageClassification.from_pretrained
    base = load(tmp_path / "new", num_labels=3, ignore_mismatched_sizes=True)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()
    own = load_checkpoint(tmp_path / "new").weights
    result.model.load_state_dict({name: own[name] if name in left_out else t for name, t in result.weights.items()})
    with torch.no_grad():
        torch.testing.assert_close(loaded(IMAGES).logits, result.model(IMAGES), rtol=1e-3, atol=1e-4)
    written = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert (written.id2label[2], written.architectures) == ("green", ["ViTForImageClassification"])


def test_without_images_an_adapter_cannot_be_scored(make, adapt, tmp_path):
    base = load_checkpoint(make(tmp_path / "old"))
    adapt(tmp_path / "tuned", base)
    sides = [tmp_path / name for name in ("old", "tuned", "old")]
    with pytest.raises(PortError, match=r"--save-as lora needs images .* extract an adapter"):
        rt.port(*sides, "none", overrides={"port.save_as": "lora", "port.rank": 8}, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("described", [False, True])
def test_without_images_an_adapter_with_its_own_head_is_added(described, base_folder, base, adapt, tmp_path):
    tuned = adapt(tmp_path / "tuned", base, lora_alpha=5, target_modules=["qkv", "patch_embed.proj"]).merge_and_unload()
    if described:  # as beside a port saved as an adapter
        save_model(tmp_path / "tuned", None, base, num_classes=3, labels=("a", "b", "c"))
    new = {name: each + 0.01 * torch.randn_like(each) for name, each in base.weights.items()}
    save_model(tmp_path / "new", new, base)
    rt.port(base_folder, tmp_path / "tuned", tmp_path / "new", "none", out=tmp_path / "out")
    found = load_checkpoint(tmp_path / "out")
    assert (found.num_classes, found.labels) == (3, ("a", "b", "c") if described else None)
    for name, each in tuned.state_dict().items():
        expected = each if name.startswith("head") else new[name] + (each - base.weights[name])
        torch.testing.assert_close(found.weights[name], expected, rtol=1e-5, atol=1e-6)


# ---- refusals

REFUSED = {
    "a rank above all": ({"port.rank": 10_000}, ModelError, "no layer has a rank of 10000: '"),
    "no rank": ({"port.rank": 0}, RecipeError, "port.rank is 0, but must be a whole number, at least 1"),
    "no energy": ({"port.energy": 0.0}, RecipeError, "port.energy is 0.0, but must be a number, at most 1, above 0"),
    "too much": ({"port.energy": 1.5}, RecipeError, "port.energy is 1.5"),
    "both": ({"port.energy": 0.5, "port.rank": 3}, RecipeError, "not both"),
    "of a model": ({"port.save_as": "model", "port.rank": 3}, RecipeError, "add --save-as lora"),
    "another kind": ({"port.save_as": "loha"}, RecipeError, "one of model, lora"),
}


@pytest.mark.parametrize(("options", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_options_give_one_line_before_anything_is_written(
    options, kind, message, base_folder, make, adapt, base, colours, short, tmp_path
):
    adapt(tmp_path / "tuned", base)
    given = short | {"port.save_as": "lora"} | options
    with pytest.raises(kind) as caught:
        rt.port(base_folder, tmp_path / "tuned", base_folder, colours, overrides=given, out=tmp_path / "out")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["tuned"]


def test_a_model_without_plain_layers(colours, short, tmp_path):
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 6, 3, groups=3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()]
    sides = [torch.nn.Sequential(*layers, torch.nn.Linear(6, 3)) for _ in range(3)]
    for number, side in enumerate(sides):
        torch.nn.init.normal_(side[-1].weight, std=1.0 + number)
    options = {key: value for key, value in short.items() if key != "data.image_size"} | {"port.save_as": "lora"}
    with pytest.raises(ModelError, match="has no linear layer or plain convolution except its head"):
        rt.port(*sides, colours, overrides=options)


def test_missing_peft_is_reported_before_any_work(base_folder, adapt, base, colours, short, tmp_path, monkeypatch):
    tuned = save_model(tmp_path / "tuned", move(base).state_dict(), base, num_classes=3)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelError, match=r"--save-as lora .* pip install 'hf-retarget\[peft\]'"):
        rt.port(base_folder, tuned, base_folder, colours, overrides=short | {"port.save_as": "lora"})

"""An untrusted config.json determines only the shape of a model: no code, URL or file, in any command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from machine import DATA, SHORT, Machine, rewrite
from safetensors.torch import load_file, save_file

ADDRESS = "http://127.0.0.1:9/x.pth"  # nothing listens there, and nothing may connect

FORBIDDEN: dict[str, Any] = {
    "pretrained_cfg_overlay": {"url": ADDRESS, "state_dict": {}},
    "pretrained_cfg": {"url": ADDRESS},
    "pretrained": True,
    "pretrained_strict": True,
    "pretrained_filter_fn": "os.system",
    "checkpoint_path": "/etc/hostname",
    "cache_dir": "elsewhere",
    "url": ADDRESS,
    "hub_id": "evil/model",
    "hf_hub_id": "evil/model",
    "hf_hub_filename": "x.bin",
    "file": "/etc/hostname",
    "source": "hf-hub",
    "state_dict": {"a": 1},
    "custom_load": True,
    "device": "meta",
    "dtype": "float16",
    "model_cfg": {},
    "feature_cfg": {"feature_cls": "fx"},
    "feature_cls": "fx",
    "features_only": True,
    "out_indices": [0],
    "kwargs_filter": ["in_chans"],
    "scriptable": True,
    "pruned": True,
    "command": "touch elsewhere/x",
}
TOO_LARGE: dict[str, Any] = {
    "layers": [1_000_000, 1, 1, 1],
    "channels": 10**9,
    "base_width": 10**12,
    "block_args": {"a": {"b": {"c": {"d": {"e": {"f": 1}}}}}},
    "act_layer": "x" * 100_000,
    "stem_type": list(range(5000)),
    "drop_rate": 1e300,
}


def spoil(model: Path, folder: Path, **arguments: Any) -> Path:
    """A folder whose weights lack a tensor, so that timm would convert them, with other arguments."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["conv1.3.weight"]
    save_file(tensors, folder / "model.safetensors")
    rewrite(folder / "config.json", lambda config: config["model_args"].update(arguments))
    return folder


def test_untrusted_arguments_are_refused(machine: Machine, model, tmp_path):
    values = {**FORBIDDEN, **TOO_LARGE}
    folders = [spoil(model, tmp_path / name, **{name: value}) for name, value in values.items()]
    for name, done in zip(values, machine.run(*(("inspect", folder) for folder in folders)), strict=True):
        done.assert_refused(f"'{name}'")


def test_every_command_refuses_them_locally_and_from_the_hub(machine: Machine, model, tmp_path):
    evil = spoil(model, tmp_path / "evil", pretrained_cfg_overlay=FORBIDDEN["pretrained_cfg_overlay"])
    machine.hub.repository("ada/evil", {path.name: path for path in evil.iterdir()})
    commands = []
    for reference in (evil, "ada/evil"):
        sides = [("--src-base", model), ("--src-ft", model), ("--new-base", model)]
        for number, side in enumerate(sides):
            trio = [*sides[:number], (side[0], reference), *sides[number + 1 :]]
            commands.append(("check", *(each for pair in trio for each in pair), *DATA))
        first = (*("--src-base", model), *("--src-ft", reference), *("--new-base", model))
        commands.append(("port", *first, *DATA, *SHORT, "--out", "out"))
        commands.append(("finetune", reference, *DATA, "--steps", "1", "--out", "out"))
        commands.append(("evaluate", reference, *DATA))
        commands.append(("inspect", reference))
    for done in machine.run(*commands):
        done.assert_refused("'pretrained_cfg_overlay'", "evil")


def test_pushing_an_untrusted_folder_runs_nothing(machine: Machine, model, tmp_path):
    evil = spoil(model, tmp_path / "evil", pretrained_cfg_overlay=FORBIDDEN["pretrained_cfg_overlay"])
    (done,) = machine.run(("push", evil, "ada/pushed"))
    assert (done.code, done.forbidden) == (0, []), done.err


SAYINGS: list[tuple[dict[str, Any], str]] = [
    ({"architecture": "local-dir:/somewhere"}, "another model, 'local-dir:/somewhere'"),
    ({"architecture": "hf-hub:evil/model"}, "another model, 'hf-hub:evil/model'"),
    ({"architecture": "hf_hub:evil/model"}, "another model, 'hf_hub:evil/model'"),
    ({"architecture": "os:system", "model_args": {"command": "touch x"}}, "the code 'os:system'"),
    ({"architecture": "../../x"}, "'../../x', which is not a timm model"),
    ({"pretrained_cfg": {"file": "/etc/hostname"}}, "'file'"),
    ({"pretrained_cfg": {"state_dict": {"a": 1}}}, "'state_dict'"),
    ({"pretrained_cfg": {"input_size": [3, 224]}}, "input_size (3, 224)"),
    ({"pretrained_cfg": {"input_size": [3, 10**9, 10**9]}}, "input_size"),
    ({"pretrained_cfg": {"mean": "red"}}, "mean 'red'"),
    ({"pretrained_cfg": {"std": [0.0]}}, "std (0.0,)"),
    ({"num_classes": 10**12}, "num_classes 1000000000000"),
    ({"num_classes": True}, "num_classes True"),
]
TEXTS = [
    ("[" * 100_000, "nested"),
    ('{"a":' * 500 + "1" + "}" * 500, "nested more than 50 levels"),
    ('{"num_classes": 1' + "0" * 5000 + "}", "is beyond"),
    ('{"num_classes": NaN}', "NaN"),
    ('"' + "x" * (17 << 20) + '"', "at most"),
]


def test_other_forbidden_settings_are_refused(machine: Machine, model, tmp_path):
    folders = [shutil.copytree(model, tmp_path / str(number)) for number in range(len(SAYINGS) + len(TEXTS))]
    for folder, (change, _) in zip(folders, SAYINGS, strict=False):
        rewrite(folder / "config.json", lambda config: config.update(change))  # noqa: B023  called at once
    for folder, (text, _) in zip(folders[len(SAYINGS) :], TEXTS, strict=True):
        (folder / "config.json").write_text(text)  # bounded before it is parsed
    done = machine.run(*(("inspect", folder) for folder in folders))
    for each, (_, words) in zip(done, (*SAYINGS, *TEXTS), strict=True):
        each.assert_refused(words)


LARGE: list[tuple[dict[str, Any], str]] = [
    ({"architecture": "vit_giant_patch14_224", "model_args": {}}, "does not fit its weights"),
    ({"num_classes": 2**20, "architecture": "resnet50", "model_args": {}}, "does not fit its weights"),
    ({"pretrained_cfg": {"crop_pct": 1e-9}}, "crop_pct"),
    ({"pretrained_cfg": {"interpolation": "xxx"}}, "interpolation 'xxx'"),
    ({"model_args": {"img_size": [1, 2, 3]}}, "img_size"),
    ({"model_args": {"img_size": "abc"}}, "img_size"),
    ({"label_names": ["\ud800"] * 10}, "surrogates not allowed"),
]


def test_huge_models_and_invalid_values_are_refused(machine: Machine, model, tmp_path):
    folders = [shutil.copytree(model, tmp_path / str(number)) for number in range(len(LARGE))]
    for folder, (change, _) in zip(folders, LARGE, strict=True):
        rewrite(folder / "config.json", lambda config: config.update(change))  # noqa: B023  called at once
    done = machine.run(*(("evaluate", folder, *DATA) for folder in folders))
    for each, (_, words) in zip(done, LARGE, strict=True):
        each.assert_refused(words)


def test_unset_arguments_are_accepted(machine: Machine, model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    unset = {"pretrained": False, "checkpoint_path": "", "features_only": False, "scriptable": None}
    rewrite(folder / "config.json", lambda config: config["model_args"].update(unset, drop_rate=0.1))
    (done,) = machine.run(("inspect", folder))
    assert (done.code, done.forbidden) == (0, []), done.err


def test_malformed_headers_and_cards(machine: Machine, model, tmp_path):
    commands = []
    for number, shape in enumerate(([0, 2**62, 2**62], [2**63, 0])):
        folder = shutil.copytree(model, tmp_path / str(number))
        header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        commands += [("inspect", folder), ("evaluate", folder, *DATA)]
    for done in machine.run(*commands):
        done.assert_refused()
    cards = ("base_model: 3", "license: !!bool x", "a: [" + "a," * 100_000 + "]", 'license: "\\UFFFFFFFF"')
    folders = [shutil.copytree(model, tmp_path / f"card-{number}") for number in range(len(cards))]
    for folder, text in zip(folders, cards, strict=True):
        (folder / "README.md").write_text(f"---\n{text}\n---\n")
    for done in machine.run(*(("inspect", folder) for folder in folders)):
        assert (done.code, done.forbidden) == (0, []), "an unreadable card is ignored"


def test_urls_in_an_old_configuration_are_not_followed(machine: Machine, model, tmp_path):
    # timm once wrote its whole description of other weights into the file; it is harmless and is not followed.
    folder = shutil.copytree(model, tmp_path / "model")
    rewrite(folder / "config.json", lambda config: config["pretrained_cfg"].update(url=ADDRESS, hf_hub_id="evil/model"))
    inspected, scored = machine.run(("inspect", folder), ("evaluate", folder, *DATA))
    assert (inspected.code, scored.code) == (0, 0), scored.err
    assert inspected.forbidden == scored.forbidden == []


def test_sizes_that_disagree_with_the_weights_are_refused(machine: Machine, model, tmp_path):
    small = shutil.copytree(model, tmp_path / "model")
    rewrite(small / "config.json", lambda config: config.update(architecture="vit_base_patch16_224", model_args={}))
    wide = {"embed_dim": 4096, "img_size": 4000, "depth": 900}
    rewrite(small / "config.json", lambda config: config["model_args"].update(wide))
    (done,) = machine.run(("inspect", small))
    done.assert_refused("does not fit its weights", "more than")


def test_a_transformers_configuration_loads_nothing_else(machine: Machine, tmp_path):
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    honest = tmp_path / "honest"
    ViTForImageClassification(ViTConfig(**sizes, image_size=16, patch_size=8, num_labels=3)).save_pretrained(honest)
    forbidden = {
        "attn_implementation": "evil/kernel",
        "_attn_implementation": "evil/kernel",
        "quantization_config": {"quant_method": "bitsandbytes"},
        "backbone": "evil/model",
        "use_pretrained_backbone": True,
        "backbone_config": {"model_type": "resnet"},
        "model_args": {"checkpoint_path": "/etc/hostname"},
    }
    large = {"num_hidden_layers": 10**6, "hidden_size": 10**12, "image_size": [10**9, 10**9]}
    folders = []
    for name, value in {**forbidden, **large}.items():
        folders.append(shutil.copytree(honest, tmp_path / name))
        rewrite(folders[-1] / "config.json", lambda config: config.update({name: value}))  # noqa: B023  called at once
    wrapper = shutil.copytree(honest, tmp_path / "wrapper")
    entries = {"model_type": "timm_wrapper", "architectures": ["TimmWrapperForImageClassification"], "architecture": 7}
    (wrapper / "config.json").write_text(json.dumps({**entries, "model_args": FORBIDDEN}))
    remote = shutil.copytree(honest, tmp_path / "remote")
    (remote / "modeling.py").write_text("raise SystemExit('run')")
    code = {"model_type": "mine", "auto_map": {"AutoModelForImageClassification": "modeling.Model"}}
    rewrite(remote / "config.json", lambda config: config.update(code))
    *done, wrapped, own = machine.run(*(("inspect", folder) for folder in (*folders, wrapper, remote)))
    for name, each in zip({**forbidden, **large}, done, strict=True):
        each.assert_refused(f"'{name}'")
    wrapped.assert_refused("timm_wrapper")
    own.assert_refused("code of its own, which is not run")
    ignored = shutil.copytree(honest, tmp_path / "ignored")
    rewrite(
        ignored / "config.json", lambda config: config.update(_name_or_path="evil/model", auto_map=code["auto_map"])
    )
    (fine,) = machine.run(("inspect", ignored))
    assert (fine.code, fine.forbidden) == (0, []), fine.err


def test_shards_must_be_beside_their_index(machine: Machine, model, tmp_path):
    names = ("../../home/secret.safetensors", "/etc/x.safetensors", "sub/x.safetensors")
    commands = []
    for number, name in enumerate(names):
        folder = shutil.copytree(model, tmp_path / str(number))
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
        commands += [("inspect", folder), ("push", folder, "ada/sharded")]
    done = machine.run(*commands)
    for inspected, pushed, name in zip(done[::2], done[1::2], names, strict=True):
        inspected.assert_refused(name)
        pushed.assert_refused()


def test_pickles_are_not_read(machine: Machine, model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    torch.save({"w": torch.zeros(1), "code": Path("x")}, folder / "pytorch_model.bin")
    refused, tensors_only = machine.run(("evaluate", folder, *DATA), ("evaluate", folder, *DATA, "--allow-pickle"))
    refused.assert_refused("only as a pickle")
    tensors_only.assert_refused("cannot be read as a pickle of tensors")

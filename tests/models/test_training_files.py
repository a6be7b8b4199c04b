"""Files that users have: checkpoints of timm's train.py, pickles of save_for_hf, modules in the current folder."""

from __future__ import annotations

import json
import pickle
import shlex
import subprocess
import sys
from argparse import Namespace
from copy import deepcopy
from pathlib import Path

import pytest
import timm
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from timm.models import save_for_hf
from timm.utils import CheckpointSaver, ModelEmaV3

import hf_retarget as rt
from hf_retarget.cli import main
from hf_retarget.errors import ModelError
from hf_retarget.models import load_checkpoint, peek_checkpoint


def run(*arguments):
    return CliRunner().invoke(main, [str(each) for each in arguments])


def one_line(result):
    assert result.exit_code == 1, result.output
    assert len(result.stderr.splitlines()) == 1
    return result.stderr


def train(folder: Path, *, averaged: bool = False, **arguments) -> tuple[Path, dict]:
    """A checkpoint of timm's train.py, written by its own CheckpointSaver after one step."""
    args = Namespace(model="test_resnet", gp=None, in_chans=None, img_size=None, model_kwargs={}, mean=None, opt="sgd")
    vars(args).update(arguments)
    torch.manual_seed(0)
    model = timm.create_model(args.model, num_classes=5, in_chans=args.in_chans or 3, **args.model_kwargs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    ema = ModelEmaV3(deepcopy(model)) if averaged else None
    model(torch.rand(2, args.in_chans or 3, 64, 64)).sum().backward()
    optimizer.step()
    folder.mkdir()
    saver = CheckpointSaver(model, optimizer, args, ema, checkpoint_dir=str(folder), recovery_dir=str(folder))
    saver.save_checkpoint(0, metric=0.5)
    return folder / "model_best.pth.tar", (ema.module if ema else model).state_dict()


def assert_same(found, expected):
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("averaged", [False, True])
def test_a_train_py_checkpoint_names_its_architecture(tmp_path, averaged):
    path, expected = train(tmp_path / "run", averaged=averaged, img_size=48, mean=[0.1, 0.2, 0.3], in_chans=3)
    found = load_checkpoint(path, allow_pickle=True)
    assert (found.architecture, found.num_classes) == ("test_resnet", 5)
    assert (found.config["input_size"], found.config["mean"]) == ((3, 48, 48), (0.1, 0.2, 0.3))
    assert_same(found.weights, expected)
    assert any("state_dict_ema" in note for note in found.notes) == averaged
    assert found.options == {}, "nothing that differs from a folder of the same model"


def test_channels_and_arguments_come_from_the_file(tmp_path):
    kwargs = {"img_size": 64}
    path, _ = train(tmp_path / "run", model="test_vit", in_chans=1, model_kwargs=kwargs)
    found = load_checkpoint(path, allow_pickle=True)
    assert found.options == {"in_chans": 1, "img_size": 64}
    assert found.build()(torch.rand(1, 1, 64, 64)).shape == (1, 5)
    assert peek_checkpoint(path, allow_pickle=True).checkpoint.num_classes == 5


def test_arch_overrules_the_file_and_a_folder_reads_it(tmp_path, save):
    path, expected = train(tmp_path / "run", averaged=True)
    assert_same(load_checkpoint(path, arch="test_resnet", allow_pickle=True).weights, expected)
    with pytest.raises(ModelError, match="the right --arch"):
        load_checkpoint(path, arch="test_vit", allow_pickle=True)
    folder = save(tmp_path / "folder", num_classes=5)
    (folder / "model.safetensors").unlink()
    path.rename(folder / path.name)
    found = load_checkpoint(folder, allow_pickle=True)
    assert_same(found.weights, expected)
    assert "state_dict_ema" in found.notes[0]


def test_the_user_is_told_which_weights_were_used(tmp_path, save):
    path, _ = train(tmp_path / "run", averaged=True)
    other = save(tmp_path / "old", num_classes=5)
    result = run("check", "--src-base", other, "--src-ft", path, "--new-base", other, "--allow-pickle")
    assert "tuned model: 'model_best.pth.tar' also holds averaged weights" in result.stdout, result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": "resnet81"}, r"it names 'resnet81', which is not a timm model; name it with --arch"),
        ({"model": "os:system"}, "which is not a timm model"),
        ({"model": 3}, "is unknown; name it with --arch"),
        ({"model_kwargs": {"checkpoint_path": "/x"}}, "the training arguments in .* 'checkpoint_path'"),
        ({"model_kwargs": {3: 4}}, "model_kwargs must be a dictionary"),
        ({"model_kwargs": "x"}, "model_kwargs must be a dictionary"),
        ({"mean": "x"}, "the training arguments in .* has mean 'x'"),
        ({"img_size": 10**6}, "input_size"),
    ],
)
def test_only_the_content_of_a_file_matters(tmp_path, arguments, words):
    path, _ = train(tmp_path / "run")
    content = torch.load(path, weights_only=False)
    vars(content["args"]).update(arguments)
    torch.save({**content, "arch": content["args"].model}, path)
    with pytest.raises(ModelError, match=words):
        load_checkpoint(path, allow_pickle=True)


class Evil:
    def __reduce__(self):
        return (Path.touch, (Path("evil"),))


def test_training_arguments_cannot_hold_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {"w": torch.zeros(1)}, "arch": "test_resnet", "args": Namespace(x=Evil())}, "run.pth")
    message = one_line(run("convert", "run.pth", "out", "--allow-pickle"))
    assert "cannot be read as a pickle of tensors" in message
    assert [path.name for path in tmp_path.iterdir()] == ["run.pth"]
    torch.save({"args": Namespace()}, "bare.pth")
    with pytest.raises(pickle.UnpicklingError):  # types allowed for our reading are not allowed globally
        torch.load("bare.pth", weights_only=True)


# ---- converting


def test_the_suggested_command_converts(tmp_path, monkeypatch):
    path, expected = train(tmp_path / "my run", averaged=True)
    monkeypatch.chdir(tmp_path)
    message = one_line(run("evaluate", path, "--data", "digits"))
    command = shlex.split(message.strip().rpartition("convert it once: ")[2])
    assert command[:2] == ["hf-retarget", "convert"]
    result = run(*command[1:])
    assert result.exit_code == 0, result.output
    assert "test_resnet" in result.stdout
    assert "state_dict_ema" in result.stdout
    made = tmp_path / "model_best-safetensors"
    assert sorted(each.name for each in made.iterdir()) == ["config.json", "model.safetensors"]
    assert_same(load_file(made / "model.safetensors"), expected)
    assert_same(timm.create_model(f"local-dir:{made}", pretrained=True).state_dict(), expected)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model_best-safetensors", "my run"]


def test_the_folder_of_a_training_names_the_command_for_its_best_checkpoint(tmp_path, monkeypatch):
    path, expected = train(tmp_path / "my run", averaged=True)
    for other in ("checkpoint-1.pth.tar", "last.pth.tar"):
        (path.parent / other).write_bytes(path.read_bytes())
    monkeypatch.chdir(tmp_path)
    message = one_line(run("evaluate", "my run", "--data", "digits"))
    command = shlex.split(message.strip().rpartition("convert its model_best.pth.tar: ")[2])
    assert run(*command[1:]).exit_code == 0
    assert_same(load_file(tmp_path / "model_best-safetensors" / "model.safetensors"), expected)


def test_the_message_repeats_the_given_architecture(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(timm.create_model("test_resnet", num_classes=3).state_dict(), "w.pth")
    message = one_line(run("evaluate", "w.pth", "--arch", "test_resnet", "--data", "digits"))
    assert message.strip().endswith("hf-retarget convert w.pth w-safetensors --allow-pickle --arch test_resnet")
    assert run(*message.rpartition("hf-retarget ")[2].split()).exit_code == 0
    assert load_checkpoint("w-safetensors").num_classes == 3


def test_convert_from_python_and_its_refusals(tmp_path):
    path, expected = train(tmp_path / "run")
    with pytest.raises(ModelError, match="--allow-pickle"):
        rt.convert(path, tmp_path / "out")
    found = rt.convert(path, tmp_path / "new" / "out", allow_pickle=True)
    assert found.architecture == "test_resnet"
    assert_same(load_checkpoint(tmp_path / "new" / "out").weights, expected)
    assert "exists already" in one_line(run("convert", path, tmp_path / "new" / "out", "--allow-pickle"))
    torch.save({"state_dict": {"w": torch.zeros(2)}}, tmp_path / "other.pth")
    assert "unknown" in one_line(run("convert", tmp_path / "other.pth", tmp_path / "x", "--allow-pickle"))
    torch.save({"state_dict": {"w": torch.zeros(2)}, "arch": "test_resnet"}, tmp_path / "other.pth")
    assert "does not fit" in one_line(run("convert", tmp_path / "other.pth", tmp_path / "x", "--allow-pickle"))
    assert not (tmp_path / "x").exists()


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    path, _ = train(tmp_path / "run")

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("hf_retarget.models.timm_models.write_json", fail)
    assert "disk full" in one_line(run("convert", path, tmp_path / "out", "--allow-pickle"))
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


# ---- folders of save_for_hf with a pickle


@pytest.fixture
def pickled(tmp_path) -> Path:
    model = timm.create_model("test_resnet", num_classes=4)
    save_for_hf(model, tmp_path / "tuned", safe_serialization=False)
    assert (tmp_path / "tuned" / "pytorch_model.bin").is_file()
    return tmp_path / "tuned"


def test_a_save_for_hf_pickle_names_the_command(pickled, monkeypatch):
    monkeypatch.chdir(pickled.parent)
    message = one_line(run("evaluate", "tuned", "--data", "digits"))
    assert message.strip().endswith("hf-retarget convert tuned tuned-safetensors --allow-pickle")
    assert run("convert", "tuned", "tuned-safetensors", "--allow-pickle").exit_code == 0
    assert load_checkpoint("tuned-safetensors").num_classes == 4


def test_inspect_needs_no_weights(pickled):
    result = run("inspect", pickled, "--json")
    assert result.exit_code == 0, result.output
    expected = sum(each.numel() for each in timm.create_model("test_resnet", num_classes=4).parameters())
    assert json.loads(result.stdout)["parameters"] == expected
    (pickled / "pytorch_model.bin").unlink()
    assert run("inspect", pickled).exit_code == 0


def test_inspect_needs_no_weights_from_the_hub(connected, pickled):
    connected.repository("ada/tuned", {path.name: path for path in pickled.iterdir()})
    result = run("inspect", "ada/tuned")
    assert result.exit_code == 0, result.output
    asked = [each for each in connected.log if "pytorch_model.bin" in str(each)]
    assert asked == []
    message = one_line(run("evaluate", "ada/tuned", "--data", "digits"))
    assert message.strip().endswith("hf-retarget convert ada/tuned tuned-safetensors --allow-pickle")


def test_a_configuration_alone_cannot_request_a_huge_model(pickled):
    (pickled / "config.json").write_text(
        json.dumps({"architecture": "test_resnet", "model_args": {"channels": [2**19, 2**19, 2**19, 2**19]}})
    )
    assert "more than 2,000,000,000 parameters" in one_line(run("inspect", pickled))


def test_inspect_of_a_file_suggests_alternatives(tmp_path):
    path, _ = train(tmp_path / "run")
    result = run("inspect", path)
    assert result.exit_code == 2
    assert "name of its architecture" in result.stderr


# ---- modules in the current folder


def test_a_factory_is_found_in_the_current_folder(tmp_path):
    lines = ("import timm", "def small(**options):", "    return timm.create_model('test_resnet', **options)")
    (tmp_path / "my_nets.py").write_text("\n".join(lines))
    (tmp_path / "timm.py").write_text("raise SystemExit('the folder stood in for an installed package')\n")
    # Like the console script, whose own folder is first on the path, not the current one.
    code = "import sys; sys.path = [each for each in sys.path if each]; from hf_retarget.cli import main; main()"
    command = [sys.executable, "-c", code, "inspect", "my_nets:small"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_missing_factory_gives_one_line():
    assert "cannot be imported: No module named 'my_netz'" in one_line(run("inspect", "my_netz:small"))

"""Help that fits on two screens, all of it on request, and a shell that completes commands, options and values."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner

from hf_retarget.cli import main
from hf_retarget.cli.recipe_options import SectionedCommand
from hf_retarget.contenders import contenders
from hf_retarget.recipe import fields, recipe_names

SCREEN = 24  # lines of 80 columns


def ask(*arguments: str) -> str:
    result = CliRunner(env={"COLUMNS": "80"}).invoke(main, arguments, terminal_width=80)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("command", ["port", "finetune"])
def test_help_fits_on_two_screens_required_options_first(command):
    text = ask(command, "--help")
    assert len(text.splitlines()) < 2 * SCREEN
    headings = re.findall(r"^([A-Z][A-Za-z -]+):$", text, re.MULTILINE)
    assert headings == ["Required", "Often used"]
    required = text.split("Required:")[1].split("Often used:")[0]
    parameters = [each for each in main.commands[command].params if each.required and each.param_type_name == "option"]
    assert all(each.opts[0] in required for each in parameters)
    assert "--data NAME" in required
    assert "--help-all" in text


@pytest.mark.parametrize("command", sorted(main.commands))
def test_no_line_of_a_help_is_wider_than_a_terminal(command):
    for flag in ("--help", *(["--help-all"] if getattr(main.commands[command], "common", []) else [])):
        assert [line for line in ask(command, flag).splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("command", ["port", "finetune"])
def test_help_all_has_every_option_once_in_groups(command):
    text = ask(command, "--help-all")
    parameters = [each for each in main.commands[command].params if each.param_type_name == "option"]
    for each in parameters:
        assert len(re.findall(rf"^ +(?:-q, )?{each.opts[-1]}[ ,/\n]", text, re.MULTILINE)) == 1, each.opts
    headings = re.findall(r"^([A-Z][A-Za-z-]+)[ (:]", text, re.MULTILINE)
    assert headings[:2] == ["Usage", "Required"]
    assert {"Options", "Models", "Result", "Hub", "Running", "Data", "Fine-tuning"} <= set(headings)


def test_the_list_of_commands_has_whole_sentences():
    lines = ask("--help").split("Commands:")[1].split("Example:")[0].strip().splitlines()
    assert len(lines) == len(main.commands)
    assert [line for line in lines if not line.endswith(".") or line.endswith("...")] == []


def test_every_common_option_exists():
    for command in main.commands.values():
        if isinstance(command, SectionedCommand):
            known = {opt for each in command.params for opt in each.opts} | {"--help"}
            assert set(command.common) <= known


def test_users_read_of_old_base_tuned_model_and_new_base():
    for command in main.commands.values():
        words = " ".join([command.help or "", *(getattr(each, "help", None) or "" for each in command.params)])
        assert not re.search(r"\b(source|target) (model|base|side)", words), command.name


# ---- completion


def complete(*words: str) -> list[str]:
    """What a shell would offer for the last of the words."""
    found = BashComplete(main, {}, "hf-retarget", "_HF_RETARGET_COMPLETE").get_completions(list(words[:-1]), words[-1])
    return [f"{each.type}" if each.type != "plain" else each.value for each in found]


def test_values_are_completed():
    assert {"port", "port-all"} <= set(complete("po"))
    assert "--new-base" in complete("port", "--new")
    methods = {each.name for each in contenders() if each.is_method} | {"auto"}
    assert set(complete("port", "--method", "")) == methods
    assert complete("port", "--method", "na") == ["naive", "naive-sign"]
    assert set(recipe_names()) <= set(complete("port", "--data", ""))
    assert [each for each in complete("finetune", "x", "--data", "cub") if each != "file"] == [
        "cub", *(each for each in complete("recipes", "show", "cub@") if each != "file")]  # fmt: skip
    assert "mnist" in complete("recipes", "show", "mni")
    assert complete("port", "--src-base", "ol") == complete("inspect", "ol") == ["file"], "models may be folders"
    assert complete("port", "--precision", "") == ["no", "bf16", "fp16"]
    for field in fields():
        if field.choices:
            assert set(complete("port", field.flag(), "")) == set(field.choices), field.key


@pytest.mark.skipif(not shutil.which("bash"), reason="there is no bash")
def test_bash_offers_the_names_of_recipes(tmp_path):
    program = tmp_path / "hf-retarget"
    program.write_text(f"#!{sys.executable}\nfrom hf_retarget.cli import main; main(prog_name='hf-retarget')\n")
    program.chmod(0o755)
    script = """eval "$(_HF_RETARGET_COMPLETE=bash_source hf-retarget)"
    compopt() { :; }  # exists only while a shell completes
    COMP_WORDS=(hf-retarget port --data cu) COMP_CWORD=3
    _hf_retarget_completion hf-retarget
    echo "${COMPREPLY[@]}"
    """
    environment = {"PYTHONPATH": ":".join(sys.path), "PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert {"cub", "cub@released-code"} <= set(done.stdout.split()), done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_documented_command_prints_a_script(shell):
    documented = (Path(__file__).parents[1] / "docs" / "automation.md").read_text()
    assert f"_HF_RETARGET_COMPLETE={shell}_source hf-retarget" in documented
    code = "from hf_retarget.cli import main; main(prog_name='hf-retarget')"
    environment = {
        "_HF_RETARGET_COMPLETE": f"{shell}_source",
        "PYTHONPATH": ":".join(sys.path),
        "PATH": "/usr/bin:/bin",
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "_HF_RETARGET_COMPLETE" in done.stdout, done.stderr

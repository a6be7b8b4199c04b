"""The places where people find this package: the `hf` command line, PyPI, a citation, job engines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import hf_retarget as rt

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
LINK = re.compile(r"\]\(([^)\s]+)\)")


def blocks(page: str, *languages: str) -> list[str]:
    """The code of a page of docs/, in one of these languages; without any, what has none."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / "docs" / page).read_text(), re.DOTALL | re.MULTILINE)
    return [text for language, text in found if language in (languages or ("",))]


def metadata() -> dict[str, object]:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text()))


# ---- hf retarget


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A home in which the commands of docs/hub.md were run."""
    folder = tmp_path_factory.mktemp("home")
    (script,) = (each for each in blocks("hub.md") if "manifest.json" in each)
    environment = {**os.environ, "HOME": str(folder), "PATH": f"{BIN}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-euc", script], env=environment, check=True)
    return folder


def hf(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    quiet = {"HF_HUB_DISABLE_UPDATE_CHECK": "1", "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, **quiet, "HOME": str(home), "HF_HOME": str(home / "hf")}
    command = [str(BIN / "hf"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_it_runs_as_an_extension_of_hf(home):
    done = hf(home, "retarget", "--version")
    assert (done.returncode, done.stdout.strip()) == (0, rt.__version__), done.stderr


def test_options_and_exit_codes_are_its_own(home, tmp_path):
    wrong = hf(home, "retarget", "outdated")
    assert (wrong.returncode, "Missing models" in wrong.stderr) == (2, True)
    failed = hf(home, "retarget", "compare", str(tmp_path / "none"))
    assert (failed.returncode, "Error: " in failed.stderr) == (1, True)


def test_hf_lists_it(home):
    assert re.search(r"retarget\s+Move a fine-tuning to a new base model", hf(home, "--help").stdout)


# ---- PyPI and citation


def test_links_work_on_pypi():
    about = metadata()
    hook = about["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]  # type: ignore[index]
    text = before = (ROOT / "README.md").read_text()
    for each in hook["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    links = LINK.findall(text)
    assert len(links) == len(LINK.findall(before)) > 20
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    home = about["project"]["urls"]["Homepage"]  # type: ignore[index]
    ours = [link for link in links if "hf-retarget/hf-retarget" in link]
    raw = home.replace("github.com", "raw.githubusercontent.com")
    for link in ours:
        path = re.sub(f"^({re.escape(home)}/blob|{re.escape(raw)})/main/", "", link).partition("#")[0]
        assert (ROOT / path).exists(), link


def test_one_address_and_one_version_everywhere():
    about = metadata()
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["repository-code"] == about["project"]["urls"]["Homepage"]  # type: ignore[index]
    assert citation["version"] == rt.__version__
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert all(each.startswith(citation["repository-code"]) for each in about["project"]["urls"].values())  # type: ignore[index]
    owner = citation["repository-code"].removeprefix("https://github.com/")
    assert f"hf extensions install {owner}" in " ".join((ROOT / "docs" / "hub.md").read_text().split())


def test_only_the_job_that_publishes_may_identify_itself_to_pypi():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    rights = {name: job.get("permissions") for name, job in workflow["jobs"].items()}
    assert rights == {"build": None, "publish": {"id-token": "write"}}
    assert workflow["jobs"]["publish"]["needs"] == "build"
    assert "password" not in str(workflow)
    assert "twine check --strict" in str(workflow["jobs"]["build"])


# ---- the examples for engines


def test_the_examples_are_well_formed():
    found = [yaml.safe_load(each) for each in blocks("automation.md", "yaml")]
    job = next(each for each in found if isinstance(each, dict) and each.get("kind") == "Job")
    assert (job["spec"]["completionMode"], job["spec"]["completions"]) == ("Indexed", 16)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert '--shard "$JOB_COMPLETION_INDEX/16"' in container["args"][0]
    scripts = [each for each in blocks("automation.md") if each.startswith(("#!", "for ", "parts="))]
    assert len(scripts) == 3
    workflows = [each["jobs"] for each in found if isinstance(each, dict) and "jobs" in each]
    steps = [step for jobs in workflows for job in jobs.values() for step in job["steps"]]
    for script in (*scripts, *(step["run"] for step in steps if "run" in step)):
        subprocess.run(["bash", "-n", "-c", script], check=True)


def test_the_example_in_kubernetes_and_hf_jobs_gives_options_that_exist():
    from hf_retarget.cli import main

    known = {name for each in main.commands["port-all"].params for name in each.opts}
    commands = "".join(each for each in blocks("automation.md", "", "yaml") if "port-all" in each)
    ours = r"(?<=\s)--(?:src-base|new-base|models[a-z-]*|out|shard|collect|no-lock)\b"
    options = set(re.findall(ours, commands))
    assert {"--shard", "--collect", "--no-lock", "--models-file"} <= options <= known


def test_the_scheduled_workflow_opens_an_issue_only_when_something_is_outdated(tmp_path):
    workflow = next(each for each in blocks("automation.md", "yaml") if "gh issue create" in each)
    steps = yaml.safe_load(workflow)["jobs"]["outdated"]["steps"]
    (script,) = (each["run"] for each in steps if "gh issue" in str(each))
    for code, listed, expected in ((0, 0, (0, False)), (3, 0, (0, True)), (3, 1, (0, False)), (1, 0, (1, False))):
        stubs = {
            "hf-retarget": f"echo 'lab/birds has a successor'; exit {code}",
            "gh": f'case "$2" in list) echo {listed};; create) cat > issue.txt;; esac',
        }
        folder = tmp_path / f"{code}-{listed}"
        folder.mkdir()
        for name, body in stubs.items():
            (folder / name).write_text(f"#!/bin/sh\n{body}\n")
            (folder / name).chmod(0o755)
        environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
        done = subprocess.run(["bash", "-eo", "pipefail", "-c", script], cwd=folder, env=environment, check=False)
        assert (done.returncode, (folder / "issue.txt").exists()) == expected
        if expected[1]:
            assert "lab/birds has a successor" in (folder / "issue.txt").read_text()

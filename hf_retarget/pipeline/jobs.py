"""Which fine-tunings are to be ported, each with its data and options: from names, or from a YAML file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hf_retarget.errors import RecipeError
from hf_retarget.models.hub import split_revision
from hf_retarget.recipe import Recipe, choose_recipe
from hf_retarget.recipe.field import nearest
from hf_retarget.untrusted import read_yaml


@dataclass(frozen=True)
class PortJob:
    """One fine-tuning to port; what it does not say is as for all.

    Example:
        >>> PortJob("me/resnet18-birds", data="cub", overrides={"port.steps": 15}).folder
        'resnet18-birds'
    """

    model: str
    data: str | None = None
    """Recipe, dataset of the Hub, folder or file."""
    recipe: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the recipe, as in {'port.steps': 15}."""
    name: str | None = None
    """Folder for the result, below that of all; by default the last part of the model's name."""

    @property
    def folder(self) -> str:
        """Where the result goes."""
        return self.name or Path(split_revision(self.model)[0]).name

    def settle(self, common: Recipe) -> Recipe:
        """The recipe for this one: its own, or that for all with its own data."""
        if self.recipe is not None:
            return choose_recipe(self.data, self.recipe, None, self.overrides)
        if self.data is not None:
            common = common.changed({"data": choose_recipe(self.data).to_dict()["data"]})
        return common.override(**dict(self.overrides))


def list_jobs(models: Iterable[str | Path | PortJob], file: str | Path | None = None) -> tuple[PortJob, ...]:
    """The jobs of a list and of a file, each with a folder of its own.

    Example:
        >>> [job.folder for job in list_jobs(["me/birds", "you/birds", "me/pets@v2"])]
        ['me--birds', 'you--birds', 'pets']
    """
    jobs = [each if isinstance(each, PortJob) else PortJob(str(each)) for each in models]
    if file is not None:
        jobs += read_jobs(file)
    if not jobs:
        raise RecipeError("no models to port; name them with --models, or in a file with --models-file")
    for job in jobs:
        check_name(job.folder)
    return _distinct(jobs)


def check_name(name: str) -> str:
    """The name of a folder below that of all; refuses one that would lie elsewhere, or be hidden.

    Example:
        >>> check_name("../birds")
        Traceback (most recent call last):
        ...
        hf_retarget.errors.RecipeError: '../birds' cannot be the name of a folder; ...
    """
    if not name or name.startswith((".", "~")) or any(letter in name for letter in "/\\\0") or len(name) > 200:
        raise RecipeError(f"{name!r} cannot be the name of a folder; give another 'name' in the models file")
    return name


def read_jobs(path: str | Path) -> list[PortJob]:
    """The jobs of a YAML file: a list of models, or of entries with `model`, `data`, `recipe`, `overrides`, `name`."""
    import yaml

    try:
        document = read_yaml(path)
    except (OSError, ValueError) as error:
        raise RecipeError(f"cannot read the models file '{path}': {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise RecipeError(f"models file '{path}'{line}: {getattr(error, 'problem', None) or error}") from error
    if isinstance(document, Mapping) and set(document) == {"models"}:
        document = document["models"]
    if not isinstance(document, list):
        raise RecipeError(f"models file '{path}' is no list; write one model a line, as in '- org/name'")
    return [_read_job(entry, f"models file '{path}', entry {number}") for number, entry in enumerate(document, 1)]


def _read_job(entry: Any, where: str) -> PortJob:
    if isinstance(entry, str):
        return PortJob(entry)
    known = [each.name for each in fields(PortJob)]
    if not isinstance(entry, Mapping) or not isinstance(entry.get("model"), str):
        raise RecipeError(f"{where}: it names no model; write '- org/name', or '- model: org/name' and more")
    for key, value in entry.items():
        if key not in known:
            raise RecipeError(f"{where}: unknown field '{key}'{nearest(key, known)} (there are {', '.join(known)})")
        expected = Mapping if key == "overrides" else str
        if not isinstance(value, expected):
            words = "fields such as 'port.steps: 15'" if key == "overrides" else "a text"
            raise RecipeError(f"{where}: {key} is {value!r}, but must be {words}")
    return PortJob(**entry)


def _distinct(jobs: Sequence[PortJob]) -> tuple[PortJob, ...]:
    """Two models of one name get the organisation, or the folder they are in, before theirs."""
    counts = Counter(job.folder for job in jobs)
    named = [job if counts[job.folder] == 1 or job.name else replace(job, name=_longer(job.model)) for job in jobs]
    twice = next((name for name, count in Counter(job.folder for job in named).items() if count > 1), None)
    if twice is not None:
        raise RecipeError(f"two models would go to the folder '{twice}'; give one of them a 'name' in the models file")
    return tuple(named)


def _longer(model: str) -> str:
    path = Path(split_revision(model)[0])
    return f"{path.parent.name}--{path.name}" if path.parent.name else path.name

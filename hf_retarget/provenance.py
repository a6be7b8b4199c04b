"""Verification of a finished port against its port.json: its own files, and the three models it was made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hf_retarget.document import ModelFacts, PortDocument, read_document
from hf_retarget.errors import AdapterError, PortError, RetargetError
from hf_retarget.files import hash_file
from hf_retarget.graph import Permutation, PermutationGraph
from hf_retarget.models import peek_checkpoint
from hf_retarget.models.hub import HubModel
from hf_retarget.models.timm_models import is_timm
from hf_retarget.names import GRAPH, MODEL_CONFIG, PERMUTATION, PORT, RECIPE, SIDES
from hf_retarget.recipe import load_recipe
from hf_retarget.untrusted import read_yaml

FORMAT = "hf-retarget/check-port/1"

_AGAIN = "restore the folder from where it was published, or make the port again"


@dataclass(frozen=True)
class PinnedModel:
    """One of the input models, as pinned in port.json."""

    reference: str
    revision: str | None
    """The commit, if it is on the Hub."""
    hashes: Mapping[str, str]
    compared: tuple[str, ...] = ()
    """Files that were found and have these hashes."""
    unseen: str | None = None
    """Why it could not be compared."""


@dataclass(frozen=True)
class PortCheck:
    """The result of `check_port`."""

    folder: str
    files: Mapping[str, str]
    """The port's own files: `same`, `differs` or `missing`; empty if an older version did not pin them."""
    pins: Mapping[str, PinnedModel]
    """The models `source`, `tuned` and `target`, and `tuned_target` if given."""
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether everything that was compared matches."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dictionary."""
        return {"format": FORMAT, "whole": self.whole, **asdict(self)}


def check_port(
    folder: str | Path, models: Mapping[str, str | Path] | None = None, *, token: str | None = None
) -> PortCheck:
    """Recompute the hashes of a finished port and of the models it was made from, and list what does not match.

    `models` gives the paths of local inputs (`source`, `tuned`, `target`), which port.json does not reveal. Models on
    the Hub are compared by the hashes it lists for the pinned commit; nothing is downloaded.
    """
    place = Path(folder)
    if not place.is_dir():
        raise PortError(f"there is no folder '{folder}'; for a port on the Hub: hf download {folder} --local-dir DIR")
    document, files = read_document(place / PORT), {}
    for name, pinned in document.files.items():
        path = place / Path(name).name
        files[name] = "missing" if not path.is_file() else "same" if hash_file(path) == pinned else "differs"
    words = {"missing": "is missing", "differs": f"is not the file that {PORT} pins"}
    problems = [f"{name} {words[state]}; {_AGAIN}" for name, state in files.items() if state in words]
    problems = problems or _compare_parts(place, document)
    unpinned = f"the port's own files are not pinned, because version {document.version} did not record their hashes"
    given, pins = models or {}, {}
    for side, facts in document.models.items():
        pins[side], differing = _compare_input(facts, given.get(side), token)
        what = f"the {SIDES.get(side, side)} is not what the port was made from"
        problems += [f"{what}: {each} of '{given.get(side) or facts.reference}' differs" for each in differing[:1]]
    return PortCheck(str(folder), files, pins, tuple(problems), () if files else (unpinned,))


def _compare_parts(place: Path, document: PortDocument) -> list[str]:
    """Check that configuration, permutation, graph and recipe belong to the same port as port.json."""
    target, fingerprint = document.models["target"], document.graph.get("fingerprint")
    parts: dict[str, tuple[Callable[[Path], Any], Any]] = {
        GRAPH: (lambda path: PermutationGraph.load(path).fingerprint, fingerprint),
        PERMUTATION: (lambda path: Permutation.load(path).fingerprint, fingerprint),
        RECIPE: (lambda path: _agrees(path, document.recipe), True),
    }
    known = target.library != "timm" or is_timm(target.architecture)  # else it is the user's own code, which is not run
    if known and document.data.classes:  # of other models than classifiers, only the files are compared
        parts[MODEL_CONFIG] = (lambda path: _describe(path.parent), (target.architecture, document.data.classes))
    problems = []
    for name, (read, expected) in parts.items():
        if (place / name).is_file():
            try:
                if read(place / name) != expected:
                    problems.append(f"{name} belongs to another port than {PORT}; {_AGAIN}")
            except RetargetError as error:
                problems.append(str(error))
    return problems


def _describe(folder: Path) -> tuple[str, int | None]:
    try:
        model = peek_checkpoint(folder).checkpoint
    except AdapterError as error:  # of a port that was saved as one
        if error.adapter is None or error.adapter.description is None:
            raise
        return error.adapter.description.architecture, error.adapter.description.num_classes
    return model.architecture, model.num_classes


def _agrees(path: Path, recipe: Mapping[str, Any]) -> bool:
    """Whether recipe.yaml agrees with port.json, which may have fields that were added in later versions."""
    load_recipe(path)  # an error if it cannot be read
    sections = {name: part for name, part in read_yaml(path).items() if isinstance(part, dict)}
    known = {name: part for name, part in recipe.items() if isinstance(part, dict)}
    return all(
        known.get(name, {}).get(key, value) == value for name, part in sections.items() for key, value in part.items()
    )


def _compare_input(facts: ModelFacts, given: Any, token: str | None) -> tuple[PinnedModel, list[str]]:
    """Compare a pinned model with its current files on the Hub or at a path; also returns those that differ."""
    pin = PinnedModel(facts.reference, facts.revision, facts.hashes)
    try:
        there = _find_hashes(facts, given, token)
    except RetargetError as error:
        if given is not None:
            raise
        return replace(pin, unseen=str(error)), []
    known = [each for each in facts.hashes if each in there]
    differing = [each for each in known if there[each] != facts.hashes[each]]
    if not known:
        pin = replace(pin, unseen="none of its files could be compared")
    return replace(pin, compared=tuple(each for each in known if each not in differing)), differing


def _find_hashes(facts: ModelFacts, given: Any, token: str | None) -> dict[str, str]:
    """The current sha256 of a model's weights, at the given path or the pinned commit."""
    path = Path(str(given or facts.reference)).expanduser()
    if given is None and facts.hub_id and facts.revision:
        return HubModel(f"{facts.hub_id}@{facts.revision}", token, None).hashes
    if given is None and facts.location:
        raise PortError("its path is not recorded; give its location to compare it")
    if path.is_dir():
        found = {name: path / Path(name).name for name in facts.hashes}
        return {name: hash_file(each) for name, each in found.items() if each.is_file()}
    if path.is_file():
        return {path.name: hash_file(path)}
    if given is not None and "/" in str(given):
        return HubModel(str(given), token, None).hashes
    raise PortError(f"there is no '{path}' here; give its location to compare it")

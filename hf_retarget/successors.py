"""Finds models whose base has a successor, and the command that ports each."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, errors
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # exported without its type

from hf_retarget.data.load import NO_DATA
from hf_retarget.document import RelationFacts, read_document
from hf_retarget.errors import ModelError, RetargetError
from hf_retarget.hub import ask, clean_token, explained, find_cause, token_was_refused
from hf_retarget.models.hub import HubModel, find_bases, read_card
from hf_retarget.models.relation import INDEPENDENT, compare_samples
from hf_retarget.models.weights import PICKLES
from hf_retarget.names import ADAPTER_CONFIG, CARD, FINETUNE, MODEL_CONFIG, PORT, RECIPE
from hf_retarget.progress import SILENT, Progress
from hf_retarget.recipe import load_recipe
from hf_retarget.streaming.repository import Repository, open_repository, sample_side
from hf_retarget.streaming.sums import find_batchnorm, plan_sums
from hf_retarget.untrusted import MAX_DOCUMENT_BYTES, read_json

FORMAT = "hf-retarget/outdated/1"

_MARKS = (PORT, FINETUNE, ADAPTER_CONFIG, MODEL_CONFIG)
"""Files that mark a folder as a model."""
_CHAIN = 10  # maximum length of a chain of new versions
_GONE = (errors.RepositoryNotFoundError, errors.GatedRepoError, errors.RevisionNotFoundError)


@dataclass(frozen=True)
class Finding:
    """The finding about one model."""

    model: str
    base: str | None = None
    """The base named by the model, if any."""
    named_by: str | None = None
    """The file that names it."""
    revision: str | None = None
    """The commit of the base the model was made from, if it is recorded or follows from dates."""
    successor: str | None = None
    """The new base with its commit, if there is one."""
    why: str | None = None
    fits: bool | None = None
    """Whether the tensors of all three models fit together; None if their headers could not be read."""
    relation: RelationFacts | None = None
    """How the bases are related, from a sample of their weights."""
    command: str | None = None
    """The command that ports it; None if it cannot be ported."""
    notes: tuple[str, ...] = ()
    error: str | None = None
    """Why the search failed, if it did."""


@dataclass(frozen=True)
class OutdatedModels:
    """The findings about all models."""

    findings: tuple[Finding, ...]

    @property
    def outdated(self) -> tuple[Finding, ...]:
        """Models whose base has a successor."""
        return tuple(each for each in self.findings if each.successor)

    @property
    def failed(self) -> tuple[Finding, ...]:
        """Models for which the search failed."""
        return tuple(each for each in self.findings if each.error)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dictionary."""
        return {"format": FORMAT, "outdated": len(self.outdated), "models": [asdict(each) for each in self.findings]}


def outdated(
    models: Iterable[str | Path] = (),
    *,
    user: str | None = None,
    folder: str | Path | None = None,
    token: str | None = None,
    progress: Progress = SILENT,
) -> OutdatedModels:
    """Find models whose base has a new version or new weights, among given ones, a user's, and those in a folder.

    The base is the one named in port.json, finetune.json, adapter_config.json or the card. Only descriptions, headers
    and a sample of the weights are read.
    """
    look = _Look(clean_token(token))
    wanted = [str(each) for each in models]
    if user is not None:
        wanted += look.list_models(user)
    if folder is not None:
        wanted += map(str, list_folders(Path(folder)))
    if not wanted:
        raise RetargetError("no models to look at; name models, or a user or a folder that has some")
    distinct = list(dict.fromkeys(wanted))
    return OutdatedModels(tuple(look.at(each) for each in progress.track(distinct, "looking at bases")))


def list_folders(folder: Path) -> list[Path]:
    """All models in a folder and its subfolders, sorted, except hidden ones and those inside another model."""
    if not folder.is_dir():
        raise RetargetError(f"there is no folder '{folder}'")
    places = {path.parent for name in _MARKS for path in folder.rglob(name)}
    shown = {each for each in places if not any(part.startswith(".") for part in each.relative_to(folder).parts)}
    found = sorted(each for each in shown if not shown & set(each.parents))
    if not found:
        raise RetargetError(f"there are no models in '{folder}': no folder in it has one of {', '.join(_MARKS)}")
    return found


# ---- the base of a model


class _Model:
    """A model on the Hub or in a folder, and the base it names."""

    def __init__(self, reference: str, token: str | None) -> None:
        self.reference = reference
        self.folder = Path(reference).expanduser()
        self.hub = None if self.folder.is_dir() else HubModel(reference, token, None)

    def find(self, name: str) -> Path | None:
        """The local path of one of its small files, if it exists."""
        if self.hub is not None:
            return self.hub.fetch(name)
        path = self.folder / name
        return path if path.is_file() else None

    def read(self, name: str) -> dict[str, Any]:
        """One of its JSON documents; empty if it does not exist."""
        path = self.find(name)
        try:
            content = read_json(path, MAX_DOCUMENT_BYTES) if path else {}
        except (OSError, ValueError) as error:
            raise ModelError(f"{name} of '{self.reference}' cannot be read: {error}; restore or remove it") from error
        return content if isinstance(content, dict) else {}

    @property
    def card(self) -> dict[str, Any]:
        return read_card(self.find(CARD) or Path())

    def name_base(self) -> tuple[Finding, Mapping[str, str]]:
        """The base according to its most precise file, or why it is unknown; and the base's hashes."""
        pinned: Mapping[str, Any] = {}
        if path := self.find(PORT):
            target, by = read_document(path).models["target"], PORT
            pinned = asdict(target)
        elif isinstance(found := self.read(FINETUNE).get("model"), dict):
            pinned, by = found, FINETUNE
        if isinstance(pinned.get("hub_id"), str) and isinstance(pinned.get("hashes"), dict):
            return Finding(self.reference, pinned["hub_id"], by, _text(pinned.get("revision"))), pinned["hashes"]
        adapter, card = self.read(ADAPTER_CONFIG), self.card
        named = [each for each in (_text(adapter.get("base_model_name_or_path")),) if each] or find_bases(card)
        kind = None if adapter else card.get("base_model_relation")
        if len(named) > 1:
            why = f"it names {len(named)} bases, so it is a merge; port the merged models"
        elif not named:
            why = "it was made from a local folder" if pinned else "it names no base; add base_model to its card"
        elif kind not in (None, "finetune", "adapter"):
            why = f"its card calls it a '{kind}' of '{named[0]}', which is not a fine-tuning"
        elif not _is_name(named[0]):
            why = f"its base '{named[0]}' is not a valid name on the Hub"
        else:
            by, revision = (ADAPTER_CONFIG, _text(adapter.get("revision"))) if adapter else (CARD, None)
            return Finding(self.reference, named[0], by, revision), {}
        return Finding(self.reference, notes=(why,)), {}


class _Look:
    """Looks at models, caching what several of them share."""

    def __init__(self, token: str | None) -> None:
        self.token, self.api = token, HfApi(token=token)
        self._asked: dict[str, HubModel] = {}
        self._place = tempfile.TemporaryDirectory(prefix="hf-retarget-")
        self._opened: dict[str, Repository] = {}

    def list_models(self, user: str) -> list[str]:
        """List the models of a user or an organisation."""
        with explained(ModelError, user):
            found = sorted(each.id for each in ask(lambda: list(self.api.list_models(author=user))))
        if not found:
            raise ModelError(f"'{user}' has no models on the Hub that you may see; check the name, or log in")
        return found

    def at(self, reference: str) -> Finding:
        """Look at one model; any error becomes part of its finding."""
        try:
            model = _Model(reference, self.token)
            found, pinned = model.name_base()
            if found.base is None:
                return found
            try:
                found = self._find_successor(found, found.base, pinned, model)
            except ModelError as error:
                cause = find_cause(error)
                if not isinstance(cause, _GONE) or token_was_refused(cause):
                    raise
                return replace(found, notes=(str(error),))
            return self._compare(found, model) if found.successor else found
        except (RetargetError, OSError) as error:
            return Finding(reference, error=str(error))

    def _find_successor(self, found: Finding, base: str, pinned: Mapping[str, str], model: _Model) -> Finding:
        now, seen = self._ask(base), [base]
        latest, name = now, now.card.get("new_version")
        while isinstance(name, str) and _is_name(name) and name not in seen and len(seen) <= _CHAIN:
            latest, seen = self._ask(name), [*seen, name]
            name = latest.card.get("new_version")
        revision = found.revision or self._date_base(model, base)
        found = replace(found, revision=revision)
        if len(seen) > 1:
            why = f"the card of '{seen[-2]}' names it as the new version"
            return replace(found, successor=f"{seen[-1]}@{latest.commit}", why=why)
        if revision is None:
            note = f"which commit of '{base}' it was made from is not recorded, so new weights cannot be detected"
            return replace(found, notes=(note,))
        before = pinned or self._ask(f"{base}@{revision}").hashes
        weights = {name for name in now.hashes if _is_weights(name)}
        shared = weights & before.keys()
        if not weights or (shared and all(before[each] == now.hashes[each] for each in shared)):
            return found
        why = f"'{base}' has new weights since commit {revision[:8]}"
        return replace(found, successor=f"{base}@{now.commit}", why=why)

    def _ask(self, name: str) -> HubModel:
        """The current state of a model on the Hub; a cached state is not accepted."""
        if name not in self._asked:
            self._asked[name] = HubModel(name, self.token, None)
        if not self._asked[name].in_reach:
            raise ModelError(f"the Hub could not be asked about '{name}'; try again")
        return self._asked[name]

    def _date_base(self, model: _Model, base: str) -> str | None:
        """The newest commit of a base that is not newer than the weights of a model."""
        if (hub := model.hub) is None:
            return None
        names = [name for name in hub.sizes if _is_weights(name)]
        with explained(ModelError, hub.repository):
            files = ask(lambda: self.api.get_paths_info(hub.repository, names, revision=hub.commit, expand=True))
        dates = [each.last_commit.date for each in files if each.last_commit]
        with explained(ModelError, base):
            commits = ask(lambda: self.api.list_repo_commits(base)) if dates else []
        return next((each.commit_id for each in commits if each.created_at <= max(dates)), None)

    # ---- the command

    def _compare(self, found: Finding, model: _Model) -> Finding:
        old = f"{found.base}@{found.revision}" if found.revision else str(found.base)
        try:
            base = self._open(old)
            sides = {"source": base, "tuned": self._open(found.model, base), "target": self._open(str(found.successor))}
        except ModelError as error:
            return replace(found, notes=(*found.notes, f"not compared: {error}"))
        try:
            plan = plan_sums(sides)
        except ModelError as error:
            return replace(found, fits=False, notes=(*found.notes, f"it cannot be ported: {error}"))
        with suppress(OSError, ValueError, ModelError):  # then they count as independent
            relation = compare_samples([sample_side(each, plan.summed) for each in sides.values()], ())
            found = replace(found, relation=relation)
        needs_images = find_batchnorm(sides) or found.relation is None or found.relation.word == INDEPENDENT
        if needs_images and not base.classes:
            note = "it takes no images, and without them a port needs bases of one lineage"
            return replace(found, fits=True, notes=(*found.notes, note))
        data = _choose_data(model) or ("DATA" if needs_images else "none")
        notes = found.notes if data != "DATA" else (*found.notes, "replace DATA by images of the kind it was tuned on")
        command = ("hf-retarget", "port", "--src-base", old, "--src-ft", found.model, "--new-base", found.successor)
        return replace(found, fits=True, command=shlex.join((*map(str, command), "--data", data)), notes=notes)

    def _open(self, reference: str, base: Repository | None = None) -> Repository:
        """Open a model from its configuration and headers; an adapter needs its base."""
        if reference not in self._opened:
            place = Path(tempfile.mkdtemp(dir=self._place.name))
            loading = {"arch": None, "allow_pickle": False, "token": self.token}
            self._opened[reference] = open_repository(
                reference, loading, place, peek=True, companions=(), base=base, force_base=True
            )
        return self._opened[reference]


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _is_name(text: str) -> bool:
    """Whether a text is a valid name of a Hub repository; most paths are not."""
    try:
        validate_repo_id(text)
    except errors.HFValidationError:
        return False
    return True


def _is_weights(name: str) -> bool:
    return "/" not in name and name.endswith((".safetensors", *PICKLES))


def _choose_data(model: _Model) -> str | None:
    """The data of a fine-tuning, if known: its recipe, or the dataset named on its card."""
    if model.hub is None and (model.folder / RECIPE).is_file():
        with suppress(RetargetError):
            if load_recipe(model.folder / RECIPE).data.reference != NO_DATA:
                return str(Path(model.reference) / RECIPE)
    named = model.card.get("datasets")
    first = next(iter(named), None) if isinstance(named, list) else named
    return first if isinstance(first, str) and _is_name(first) else None

"""The metadata at the head of a README: read, checked and turned into tags as the Hub does."""

from __future__ import annotations

from typing import Any

import yaml

_LICENCES = """
afl-3.0 agpl-3.0 apache-2.0 apple-amlr apple-ascl artistic-2.0 bigcode-openrail-m bigscience-bloom-rail-1.0
bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5
cc-by-3.0 cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0
cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0
cdla-permissive-2.0 cdla-sharing-1.0 creativeml-openrail-m deepfloyd-if-license ecl-2.0 epl-1.0 epl-2.0
etalab-2.0 eupl-1.1 eupl-1.2 fair-noncommercial-research-license gemma gfdl gpl gpl-2.0 gpl-3.0 h-research
intel-research isc lgpl lgpl-2.1 lgpl-3.0 lgpl-lr llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 lppl-1.3c mit
mpl-2.0 ms-pl ncsa odbl odc-by ofl-1.1 openmdw-1.0 openrail openrail++ osl-3.0 other pddl postgresql unknown unlicense
wtfpl zlib
"""
LICENCES = frozenset(_LICENCES.split())


def metadata_of(readme: str) -> dict[str, Any]:
    """What stands between the two lines `---`; empty if nothing does. Raises ValueError if it is no mapping.

    >>> metadata_of("---\\nlicense: mit\\n---\\n# Title")
    {'license': 'mit'}
    """
    lines = readme.lstrip("\ufeff").splitlines()
    if not lines or lines[0].strip() != "---" or "---" not in (line.rstrip() for line in lines[1:]):
        return {}
    end = [line.rstrip() for line in lines[1:]].index("---") + 1
    try:
        metadata = yaml.safe_load("\n".join(lines[1:end]))
    except yaml.YAMLError as error:
        raise ValueError(f"YAML: {error}") from error
    if metadata is not None and not isinstance(metadata, dict):
        raise ValueError("the metadata must be a mapping")
    return metadata or {}


def problems_of(readme: str) -> tuple[list[str], list[str]]:
    """Errors, for which the Hub refuses a README, and warnings.

    >>> problems_of("---\\nlicense: mine\\n---\\n")[0]
    ['"license" must be one of the known identifiers; "mine" is not']
    """
    try:
        metadata = metadata_of(readme)
    except ValueError as error:
        return [str(error)], []
    if not metadata:
        return [], ["empty or missing yaml metadata in repo card"]
    licences = _as_list(metadata.get("license"))
    errors = [
        f'"license" must be one of the known identifiers; "{name}" is not' for name in licences if name not in LICENCES
    ]
    for name in ("tags", "datasets", "base_model", "language", "metrics"):
        if not all(isinstance(each, str) for each in _as_list(metadata.get(name))):
            errors.append(f'"{name}" must be a string or a list of strings')
    return errors + _problems_of_results(metadata.get("model-index")), []


def _problems_of_results(index: Any) -> list[str]:
    if index is None:
        return []
    if not isinstance(index, list):
        return ['"model-index" must be a list']
    errors = []
    for number, model in enumerate(index):
        if not isinstance(model, dict) or not model.get("name"):
            errors.append(f'"model-index[{number}].name" is required')
            continue
        for at, result in enumerate(model.get("results") or []):
            where = f"model-index[{number}].results[{at}]"
            for part, name in (("task", "type"), ("dataset", "type"), ("dataset", "name")):
                if not (result.get(part) or {}).get(name):
                    errors.append(f'"{where}.{part}.{name}" is required')
            for metric in result.get("metrics") or [{}]:
                if "type" not in metric or metric.get("value") is None:
                    errors.append(f'"{where}.metrics" need a type and a value')
    return errors


def tags_of(metadata: dict[str, Any]) -> list[str]:
    """The tags by which the Hub finds a repository: its own, and those made of the other entries.

    >>> tags_of({"license": "mit", "base_model": "ada/vit", "base_model_relation": "finetune"})
    ['base_model:ada/vit', 'base_model:finetune:ada/vit', 'license:mit']
    """
    tags = [str(tag) for tag in _as_list(metadata.get("tags"))]
    tags += [str(metadata[name]) for name in ("library_name", "pipeline_tag") if name in metadata]
    for base in _as_list(metadata.get("base_model")):
        tags += [f"base_model:{base}", f"base_model:{metadata.get('base_model_relation', 'finetune')}:{base}"]
    tags += [f"dataset:{name}" for name in _as_list(metadata.get("datasets"))]
    tags += [f"license:{name}" for name in _as_list(metadata.get("license"))]
    return list(dict.fromkeys(tags))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]

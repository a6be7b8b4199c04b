"""A cache of verified permutation graphs, so that each architecture is traced and verified only once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import cached_assets_path, constants

from hf_retarget.errors import PermutationError
from hf_retarget.files import hash_file, load_record, save_record
from hf_retarget.graph.permutation_graph import PermutationGraph
from hf_retarget.graph.verify import NegativeControl, Verification


def recall_graph(key: Mapping[str, Any]) -> tuple[PermutationGraph, Verification] | None:
    """The graph cached under a key, or None if it is absent or damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError, PermutationError):
        plain, graph, about = _place(key)
        facts = load_record(about)
        if facts["graph"] == hash_file(graph) and facts["key"] == plain:
            found = facts["verification"]
            controls = tuple(NegativeControl(**each) for each in found.pop("controls"))
            return PermutationGraph.load(graph), Verification(**found, controls=controls)
    return None


def keep_graph(key: Mapping[str, Any], graph: PermutationGraph, verification: Verification) -> None:
    """Cache a verified graph, unless the cache cannot be written."""
    with suppress(OSError, ValueError):  # the Hub client raises ValueError for folders that are files
        plain, path, about = _place(key)
        graph.save(path)
        facts = {name: value for name, value in verification.to_json().items() if name not in ("passed", "verdict")}
        save_record(about, {"key": plain, "graph": hash_file(path), "verification": facts})


def _place(key: Mapping[str, Any]) -> tuple[dict[str, Any], Path, Path]:
    """The complete key, and the paths of the graph and its verification."""
    plain = {**json.loads(json.dumps(key)), "rules": _hash_rules()}
    name = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:32]
    folder = cached_assets_path("hf-retarget", namespace="graphs", subfolder=name, assets_dir=constants.HF_ASSETS_CACHE)
    return plain, folder / "graph.json", folder / "verification.json"


@cache
def _hash_rules() -> str:
    """A hash of the code that derives and verifies graphs, so that changes to it invalidate the cache."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()

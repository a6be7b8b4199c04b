"""Converts port.json of version 1 to version 2. Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_retarget.contenders import AFTER, BESIDE, PORT, Contender, find_contender


def upgrade(old: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a document of version 1, which had a key for each contender; the format entry is left to the caller."""
    inputs, permutation = dict(old["inputs"]), dict(old["permutation"])
    winner = "given" if permutation["given"] else old["recipe"]["port"]["method"]
    names = {"port": winner, "masked": "naive-sign", "control": "plain", "tuned_target": "tuned-target"}
    found: dict[str, dict[str, Any]] = {}
    for key, score in old["test"].items():
        name = names.get(key, key)
        if name not in found:  # a naive port was listed twice
            found[name] = {"name": name, "test": score, **_upgrade_contender(old, key, find_contender(name))}
    recipe = {name: dict(part) if isinstance(part, dict) else part for name, part in old["recipe"].items()}
    recipe["port"] = {"targets": "labels", "alpha": None, "update": 1.0, **recipe["port"]}
    recipe["data"] = {"validation_split": None, **recipe["data"]}
    return {
        **old,
        "recipe": recipe,
        "winner": winner,
        "contenders": list(found.values()),
        "data": inputs.pop("data"),
        "models": inputs,
        "permutation": {**permutation, "origin": permutation.get("from")},
        "samples": _upgrade_samples(old.get("samples"), names),
        **{key: old.get(key) or {} for key in ("matching", "batchnorm", "memory", "device")},
    }


def _upgrade_contender(old: Mapping[str, Any], key: str, row: Contender) -> dict[str, Any]:
    """Convert one contender; curves were over minibatches, and ports had none over their price."""
    port, spent = old["recipe"]["port"], int(old["gradients"]["port"])
    batch, after = int(port["batch_size"]), int(old["recipe"]["finetune"]["batch_size"])
    steps = (old["steps"] if key == "port" else old.get(f"{key}_steps")) or []
    best = old["best_step"] if key == "port" else old.get(f"{key}_best_step")
    made = row.gradients(len(steps))
    taken = spent if key == "port" else made * int(port["grad_batches"])
    curve = [(batch * taken / made * row.gradients(each["step"]), each["top1"]) for each in steps if made]
    if key == "control":
        taken = old["gradients"]["control"]
        curve = [(batch * float(at), top1) for at, top1 in old["curves"].get(key) or ()]
    if key == "finetuned":  # its curve began after the port's minibatches, whose size may differ
        places = [(float(at) - spent, top1) for at, top1 in old["curves"].get(key) or ()]
        taken = max(0, round(places[-1][0])) if places else 0
        curve = [(batch * spent + after * at, top1) for at, top1 in places]
    level = steps[best - 1]["top1"] if best else (old.get("levels") or {}).get(key)
    if level is None:
        level = curve[-1][1] if curve else old["test"][key]["top1"]
    role = PORT if key == "port" else AFTER if key == "finetuned" else BESIDE
    return {"role": role, "gradients": taken, "validation": level, "best_step": best, "steps": steps, "curve": curve}


def _upgrade_samples(samples: Mapping[str, Any] | None, names: Mapping[str, str]) -> dict[str, Any] | None:
    """Convert the sample images to the new names of contenders."""
    if not samples:
        return None
    images = [
        {**image, "predictions": {names.get(who, who): guess for who, guess in image["predictions"].items()}}
        for image in samples["images"]
    ]
    judges = {side: names.get(samples[side], samples[side]) for side in ("ours", "theirs")}
    return {**samples, **judges, "images": images}

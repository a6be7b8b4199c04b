"""Ports without images: any safetensors model of one lineage, file by file, and what is refused."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_lm import WORDS, make_lm, save_lm, save_trio, shake
from transformers import AutoModelForCausalLM

import hf_retarget as rt
from hf_retarget.cli import main
from hf_retarget.document import read_document
from hf_retarget.models import load_checkpoint, save_model
from hf_retarget.streaming.sums import fit_rows


def port(trio, out, **options):
    return rt.port(*(trio[side] for side in ("src_base", "src_ft", "new_base")), "none", out=out, **options)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each for path in sorted(folder.glob("*.safetensors")) for name, each in load_file(path).items()}


def add(trio, alpha=1.0):
    """The sum in memory."""
    old, tuned, new = (weights_of(trio[side]) for side in ("src_base", "src_ft", "new_base"))
    return {
        name: (new[name].float() + alpha * (tuned[name].float() - old[name].float())).to(new[name].dtype)
        for name in new
    }


def change_config(folder: Path, **entries):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def rewrite(folder: Path, change) -> None:
    """Change the tensors of a folder with one file of weights."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


# ---- what comes out


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_shard_size": "8KB"},
        {"tie_word_embeddings": True, "dtype": torch.bfloat16},
        {"dtype": torch.float16, "max_shard_size": "8KB"},
    ],
    ids=["plain", "sharded", "tied-bfloat16", "sharded-float16"],
)
def test_logits_equal_those_of_the_sum_in_memory(tmp_path, kind, options):
    trio = save_trio(tmp_path, kind, **options)
    done = port(trio, tmp_path / "out")
    expected = AutoModelForCausalLM.from_pretrained(trio["new_base"])
    expected.load_state_dict(add(trio), strict=False)
    expected.tie_weights()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.arange(20)[None]
    assert found.dtype == expected.dtype == options.get("dtype", torch.float32)
    assert torch.equal(found(tokens).logits, expected(tokens).logits)
    assert not torch.equal(found(tokens).logits, AutoModelForCausalLM.from_pretrained(trio["new_base"])(tokens).logits)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "port.json", "README.md"} <= names
    assert ("model.safetensors.index.json" in names) is ("max_shard_size" in options)
    assert ("lm_head.weight" in weights_of(tmp_path / "out")) is not options.get("tie_word_embeddings", False)
    assert done.verdict.startswith("Not scored")
    assert read_document(tmp_path / "out" / "port.json") == done.document


def test_transformers_writes_the_same_file(trio, tmp_path):
    """The bytes equal those of safetensors: the same order and alignment."""
    port(trio, tmp_path / "out")
    save_file(add(trio), tmp_path / "expected.safetensors", {"format": "pt"})
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "expected.safetensors").read_bytes()


def test_alpha_update_and_dtype(trio, tmp_path):
    port(trio, tmp_path / "half", overrides={"port.alpha": 0.5}, dtype="bfloat16")
    for name, tensor in weights_of(tmp_path / "half").items():
        assert torch.equal(tensor, add(trio, 0.5)[name].bfloat16())
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    port(trio, tmp_path / "update", overrides={"port.update": 0.25})
    old, tuned, new = (weights_of(trio[side]) for side in ("src_base", "src_ft", "new_base"))
    for name, tensor in weights_of(tmp_path / "update").items():
        assert torch.allclose(tensor, tuned[name] + 0.25 * (new[name] - old[name]), atol=1e-6)
    with pytest.raises(rt.PortError, match="scale the same line"):
        port(trio, tmp_path / "both", overrides={"port.update": 0.5, "port.alpha": 0.5})


def test_mixed_types_are_summed_in_float32_and_kept(trio, tmp_path):
    rewrite(trio["src_ft"], lambda weights: weights.update({name: each.half() for name, each in weights.items()}))

    def mix(weights):
        weights["model.norm.weight"] = weights["model.norm.weight"].double()
        weights["lm_head.weight"] = weights["lm_head.weight"].bfloat16()
        weights["position_ids"] = torch.arange(5)

    rewrite(trio["new_base"], mix)
    done = port(trio, tmp_path / "out")
    assert "1 tensor (position_ids) only in the new base: kept" in done.document.notes
    found = weights_of(tmp_path / "out")
    assert found["model.norm.weight"].dtype == torch.float64
    assert found["lm_head.weight"].dtype == torch.bfloat16
    assert torch.equal(found["position_ids"], torch.arange(5))  # only the new base has it
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_large_tensors_are_read_in_blocks(trio, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_retarget.streaming.sums.BLOCK", 7)
    port(trio, tmp_path / "out")
    assert all(torch.equal(each, add(trio)[name]) for name, each in weights_of(tmp_path / "out").items())


def test_card_and_page_describe_the_port(trio, tmp_path):
    (trio["new_base"] / "README.md").write_text("---\nlicense: apache-2.0\nbase_model: org/older\n---\n# Base\n")
    port(trio, tmp_path / "out")
    card, page = ((tmp_path / "out" / name).read_text() for name in ("README.md", "report.html"))
    assert "pipeline_tag: text-generation" in card
    assert "license: apache-2.0" in card
    assert "Not scored" in card
    assert "Images:" not in card
    assert "classes" not in card
    assert "paired difference" not in card
    assert "same lineage" in page
    assert "model.safetensors sha256" in page
    with pytest.raises(rt.RetargetError, match="without images"):
        rt.compare([tmp_path / "out"])


def test_configuration_changes_of_the_fine_tuning_are_kept(trio, tmp_path):
    change_config(trio["src_ft"], eos_token_id=7, rope_scaling=None, hidden_act="silu", torch_dtype="float16")
    change_config(trio["new_base"], max_position_embeddings=128, attention_dropout=0.1, auto_map={"AutoModel": "a.B"})
    change_config(trio["src_ft"], attention_dropout=0.2)
    done = port(trio, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["eos_token_id"], config["max_position_embeddings"], config["attention_dropout"]) == (7, 128, 0.1)
    assert any("attention_dropout" in note and "0.2" in note for note in done.document.notes)
    assert any("code of the new base (auto_map), which is not copied" in note for note in done.document.notes)


# ---- vocabularies


@pytest.mark.parametrize(
    ("tuned", "new", "rows", "tokenizer"), [(2, 0, 2, "src_ft"), (0, 3, 3, "new_base"), (-2, 0, 0, "new_base")]
)
def test_vocabularies_of_different_length(tmp_path, tuned, new, rows, tokenizer):
    more = [*WORDS, "<one>", "<two>", "<three>"]
    old, size = make_lm(), len(WORDS)
    trio = {
        "src_base": save_lm(old, tmp_path / "old"),
        "src_ft": save_lm(shake(old, 0.05, 1, size + tuned), tmp_path / "tuned", more[: size + tuned]),
        "new_base": save_lm(shake(old, 0.02, 2, size + new), tmp_path / "new", more[: size + new]),
    }
    done = port(trio, tmp_path / "out")
    found = weights_of(tmp_path / "out")["model.embed_tokens.weight"]
    sides = [weights_of(each)["model.embed_tokens.weight"] for each in trio.values()]
    common = min(map(len, sides))
    assert len(found) == size + rows == json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"]
    assert torch.equal(found[:common], sides[2][:common] + (sides[1][:common] - sides[0][:common]))
    assert torch.equal(found[common:], sides[1 if tuned > 0 else 2][common:])
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (trio[tokenizer] / "tokenizer.json").read_bytes()
    words = {2: "'<one>', '<two>'", 3: "'<one>', '<two>', '<three>'", 0: "'9', '<unk>'"}[rows]
    assert any(words in note for note in done.document.notes)
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")(torch.arange(5)[None])


def test_padding_rows_may_be_cut_or_used(tmp_path):
    """Vocabularies are padded; a fine-tuning may cut the padding or use a row for a new token."""
    old, mine = make_lm(vocab_size=len(WORDS) + 8), [*WORDS, "<mine>"]
    trio = {
        "src_base": save_lm(old, tmp_path / "old"),
        "src_ft": save_lm(shake(old, 0.05, 1, len(mine)), tmp_path / "tuned", mine),
        "new_base": save_lm(shake(old, 0.02, 2), tmp_path / "new"),
    }
    port(trio, tmp_path / "cut")
    assert len(weights_of(tmp_path / "cut")["lm_head.weight"]) == len(WORDS) + 8
    assert "<mine>" in (tmp_path / "cut" / "tokenizer.json").read_text(), "the new base has no token that it lacks"
    save_lm(shake(old, 0.05, 1), trio["src_ft"], mine)
    save_lm(shake(old, 0.02, 2), trio["new_base"], [*WORDS, "<theirs>"])
    (note,) = (each for each in port(trio, tmp_path / "both").document.notes if "both" in each)
    assert f"{len(WORDS)} is '<mine>' in the tuned model and '<theirs>' in the new base" in note


@pytest.mark.parametrize("bare", [("src_base", "new_base"), ("src_base",), ("src_ft",)])
def test_models_with_and_without_the_prefix_of_a_head(tmp_path, bare):
    """Like GPT-2, which is published without the prefix `transformer.` of its fine-tunings."""
    trio = save_trio(tmp_path, "gpt2")
    expected = add(trio)
    for side in bare:
        rewrite(trio[side], lambda weights: [weights.update({n[12:]: weights.pop(n)}) for n in list(weights)])
    rewrite(trio["src_base"], lambda weights: weights.update({"h.0.attn.bias": torch.ones(1, 1, 4, 4)}))  # a mask
    done = port(trio, tmp_path / "out")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    assert not any("stay" in note or "taken" in note for note in done.document.notes)


def test_incompatible_vocabularies_are_refused(trio, tmp_path):
    with pytest.raises(rt.ModelError, match="both the tuned model and the new base"):
        fit_rows(10, 12, 12)
    save_lm(AutoModelForCausalLM.from_pretrained(trio["new_base"]), trio["new_base"], [*WORDS[1:], "a"])
    with pytest.raises(rt.ModelError, match="token 0 is 'a' in the old base and 'b' in the new base"):
        port(trio, tmp_path / "out")
    assert fit_rows(10, 8, 9) == (9, 8, "target")


def test_a_stored_output_layer_stays_tied_unless_it_was_untied(tmp_path):
    trio = save_trio(tmp_path, tie_word_embeddings=True)
    embeddings = weights_of(trio["src_ft"])["model.embed_tokens.weight"]
    rewrite(trio["src_ft"], lambda weights: weights.update({"lm_head.weight": embeddings.clone()}))
    done = port(trio, tmp_path / "tied")
    assert "lm_head.weight" not in weights_of(tmp_path / "tied")
    assert any("tied" in note for note in done.document.notes)
    rewrite(trio["src_ft"], lambda weights: weights.update({"lm_head.weight": embeddings + 0.1}))
    port(trio, tmp_path / "untied")
    old, new = (weights_of(trio[side])["model.embed_tokens.weight"] for side in ("src_base", "new_base"))
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "untied").lm_head.weight
    assert torch.equal(found, new + ((embeddings + 0.1) - old))


# ---- other models


def test_modules_heads_and_files(tmp_path):
    """Image classifiers are ported the same way; a head for other classes is the tuned model's."""
    import timm

    torch.manual_seed(0)
    old = timm.create_model("test_vit", num_classes=5)
    new, tuned = (timm.create_model("test_vit", num_classes=classes) for classes in (5, 3))
    for other, scale in ((new, 0.01), (tuned, 0.02)):
        fitting = {name: each for name, each in old.state_dict().items() if not name.startswith("head")}
        other.load_state_dict(fitting | {k: v for k, v in other.state_dict().items() if k.startswith("head")})
        with torch.no_grad():
            for name, each in other.named_parameters():
                each.add_(scale * each.std() * torch.randn_like(each)) if not name.startswith("head") else None
    rt.port(old, tuned, new, "none", out=tmp_path / "out")
    made = load_checkpoint(tmp_path / "out")
    assert made.num_classes == 3
    assert torch.equal(made.weights["head.weight"], tuned.head.weight)
    name = "blocks.0.mlp.fc1.weight"
    expected = new.state_dict()[name] + (tuned.state_dict()[name] - old.state_dict()[name])
    assert torch.equal(made.weights[name], expected)
    for name, model in (("old", old), ("new", new)):
        save_file(model.state_dict(), tmp_path / f"{name}.safetensors")
    torch.save(tuned.state_dict(), tmp_path / "tuned.pth")
    files = [tmp_path / name for name in ("old.safetensors", "tuned.pth", "new.safetensors")]
    with pytest.raises(rt.ModelError, match="--allow-pickle"):
        rt.port(*files, "none", arch="test_vit", out=tmp_path / "again")
    rt.port(*files, "none", arch="test_vit", allow_pickle=True, out=tmp_path / "again")
    again = load_checkpoint(tmp_path / "again").weights
    assert all(torch.equal(each, again[name]) for name, each in made.weights.items())


@pytest.mark.parametrize("options", [{}, {"dtype": "float32"}])
def test_a_timm_model_stays_a_single_file_that_timm_loads(tmp_path, options):
    """Even if it has more numbers than the new base, or wider ones."""
    import timm

    torch.manual_seed(0)
    old, wide = timm.create_model("test_vit", num_classes=3), timm.create_model("test_vit", num_classes=90)
    weights, sides = old.state_dict(), []
    for name, model in (("old", old), ("tuned", wide), ("new", old)):
        own = {k: v for k, v in model.state_dict().items() if k.startswith("head")}
        moved = {k: v + 0.01 * torch.randn_like(v) for k, v in weights.items()} | own
        sides.append(save_model(tmp_path / name, moved, load_checkpoint(model), dtype=torch.bfloat16))
    rt.port(*sides, "none", out=tmp_path / "out", **options)
    found = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True)
    assert torch.equal(found.head.weight, load_file(sides[1] / "model.safetensors")["head.weight"].float())


def test_a_head_for_other_classes_is_copied(tmp_path):
    import timm

    torch.manual_seed(0)
    old = timm.create_model("test_vit", num_classes=5)
    tuned, new = timm.create_model("test_vit", num_classes=5), timm.create_model("test_vit", num_classes=5)
    for other, scale in ((tuned, 0.02), (new, 0.01)):
        other.load_state_dict({k: v + scale * torch.randn_like(v) * v.std() for k, v in old.state_dict().items()})
    torch.nn.init.normal_(tuned.head.weight)
    rt.port(old, tuned, new, "none", out=tmp_path / "out")
    assert torch.equal(load_checkpoint(tmp_path / "out").weights["head.weight"], tuned.head.weight)
    assert torch.equal(load_checkpoint(tmp_path / "out").weights["head.bias"], tuned.head.bias)
    rt.port(old, tuned, new, "none", overrides={"port.head": "own"}, out=tmp_path / "own")
    expected = new.head.weight + (tuned.head.weight - old.head.weight)
    assert torch.equal(load_checkpoint(tmp_path / "own").weights["head.weight"], expected)


# ---- the Hub


def test_a_port_from_the_hub_and_back(tmp_path, connected):
    trio = save_trio(tmp_path, max_shard_size="8KB")
    content = {side: {path.name: path.read_bytes() for path in folder.iterdir()} for side, folder in trio.items()}
    for side, each in content.items():
        connected.repository(f"org/{side}", each)
    names = {side: f"org/{side}" for side in trio}
    done = port(names, tmp_path / "out")
    assert all(torch.equal(each, add(trio)[name]) for name, each in weights_of(tmp_path / "out").items())
    facts = done.document.models["target"]
    assert facts.hub_id == "org/new_base"
    assert facts.revision
    assert len(facts.hashes) > 1
    done.push_to_hub("ada/ported")
    pushed = set(load_repository("ada/ported"))
    assert {"tokenizer.json", "model.safetensors.index.json", "model-00001-of-00003.safetensors"} <= pushed


def load_repository(name):
    import huggingface_hub

    return huggingface_hub.HfApi().list_repo_files(name)


def test_independent_bases_are_refused_before_their_weights_are_downloaded(tmp_path, connected):
    trio = save_trio(tmp_path)
    other = save_lm(make_lm(7), tmp_path / "other")
    for side, folder in {**trio, "other": other}.items():
        connected.repository(f"org/{side}", {path.name: path.read_bytes() for path in folder.iterdir()})
    names = {side: f"org/{side}" for side in trio} | {"new_base": "org/other"}
    with pytest.raises(rt.PortError, match="independent"):
        port(names, tmp_path / "out")
    cache = list((tmp_path / "cache").rglob("model.safetensors"))
    assert cache == []
    assert not (tmp_path / "out").exists()


# ---- interruptions

_KILLED = """
import os, signal, sys
from hf_retarget.streaming.sums import Sum
import hf_retarget as rt
left, compute = [int(sys.argv[1])], Sum.compute
def killing(self, *factors):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return compute(self, *factors)
Sum.compute = killing
rt.port(*sys.argv[2:5], "none", out=sys.argv[5])
"""


def test_a_killed_port_resumes_to_the_same_bytes(tmp_path):
    trio = save_trio(tmp_path, max_shard_size="8KB")
    port(trio, tmp_path / "whole")
    code = subprocess.run([sys.executable, "-c", _KILLED, "12", *map(str, trio.values()), tmp_path / "out"]).returncode
    assert code == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    kept = sorted((tmp_path / ".out.work" / "model").glob("model*.safetensors"))
    times = {path.name: path.stat().st_ino for path in kept}
    assert 0 < len(kept) < len(list((tmp_path / "whole").glob("*.safetensors")))
    with pytest.raises(rt.PortError, match="--resume"):
        port(trio, tmp_path / "out")
    with pytest.raises(rt.PortError, match="a different one"):
        port(trio, tmp_path / "out", resume=True, overrides={"port.alpha": 0.5})
    port(trio, tmp_path / "out", resume=True)
    for path in sorted((tmp_path / "whole").iterdir()):
        if path.name not in ("port.json", "report.html"):  # seconds and peak memory
            assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes(), path.name
    assert all((tmp_path / "out" / name).stat().st_ino == number for name, number in times.items())
    assert not (tmp_path / ".out.work").exists()
    with pytest.raises(rt.FinishedError):
        port(trio, tmp_path / "out", resume=True)


def test_a_full_disk_gives_one_line_and_the_port_continues(tmp_path):
    trio = save_trio(tmp_path, max_shard_size="8KB")
    sizes = sorted(path.stat().st_size for path in trio["new_base"].glob("*.safetensors"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (sizes[-1] - 100, before[1]))
    try:
        with pytest.raises(rt.PortError, match=r"cannot work in '.*out': .*; the same command with --resume continues"):
            port(trio, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "out").exists()
    port(trio, tmp_path / "out", resume=True)
    assert all(torch.equal(each, add(trio)[name]) for name, each in weights_of(tmp_path / "out").items())


# ---- bad input


def test_independent_bases_are_refused_unless_forced(trio, tmp_path):
    trio["new_base"] = save_lm(make_lm(7), tmp_path / "other")
    with pytest.raises(rt.PortError, match=r"independent.*labels are not.*--force-relation"):
        port(trio, tmp_path / "out")
    done = port(trio, tmp_path / "out", force_relation=True)
    assert done.verdict.startswith("Check first: these bases are independent")
    assert all(torch.equal(each, add(trio)[name]) for name, each in weights_of(tmp_path / "out").items())


def _break(trio, what: str) -> None:
    tuned, new = trio["src_ft"], trio["new_base"]
    if what == "batchnorm":
        rewrite(new, lambda weights: weights.update({"bn.running_mean": torch.zeros(3)}))
    elif what == "eight bits":
        rewrite(tuned, lambda weights: weights.update({"lm_head.weight": weights["lm_head.weight"].to(torch.int8)}))
    elif what == "scaled floats":
        rewrite(
            tuned, lambda weights: weights.update({"lm_head.weight": weights["lm_head.weight"].to(torch.float8_e4m3fn)})
        )
    elif what == "wider":
        rewrite(new, lambda weights: weights.update({"model.norm.weight": torch.ones(17, 2)}))
    elif what == "longer":
        rewrite(tuned, lambda weights: weights.update({"model.norm.weight": torch.ones(18)}))
    elif what == "deeper":
        rewrite(new, lambda weights: weights.pop("model.layers.1.self_attn.q_proj.weight"))
    elif what == "nothing in common":
        rewrite(
            tuned, lambda weights: [weights.update({f"module.{name}": weights.pop(name)}) for name in list(weights)]
        )
    elif what == "cut off":
        (new / "model.safetensors").write_bytes((new / "model.safetensors").read_bytes()[:-10])
    elif what == "not finite":
        rewrite(tuned, lambda weights: weights["lm_head.weight"].fill_(float("nan")))
    elif what == "too large":
        rewrite(tuned, lambda weights: weights["model.norm.weight"].fill_(1e6))
        rewrite(new, lambda weights: weights.update({name: each.half() for name, each in weights.items()}))
    elif what == "no config":
        (new / "config.json").unlink()
    elif what == "no change":
        save_lm(AutoModelForCausalLM.from_pretrained(trio["src_base"]), tuned)
    elif what == "link":
        (tuned / "tokenizer.json").unlink()
        (tuned / "tokenizer.json").symlink_to("/etc/hostname")


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("batchnorm", r"new base has BatchNorm layers \('bn.running_mean'\)"),
        ("eight bits", "'lm_head.weight' is stored as I8, which cannot be added"),
        ("scaled floats", "'lm_head.weight' is stored as F8_E4M3, which cannot be added"),
        (
            "wider",
            r"differ: in the new base, 1 tensor has another shape \(model.norm.weight is \[17, 2\], not \[16\]\)",
        ),
        ("longer", r"1 tensor has another shape \(model.norm.weight is \[16\], not \[18\]\)"),
        ("deeper", r"in the new base, 1 tensor is missing \(model.layers.1.self_attn.q_proj.weight"),
        ("nothing in common", "tensors are missing"),
        ("cut off", "not a whole safetensors file"),
        ("not finite", "'lm_head.weight' holds NaN or infinite numbers in '.*src_ft.*'"),
        ("too large", "'model.norm.weight' gets numbers up to 1e.06, too large for torch.float16; .*--dtype"),
        ("no config", r"has no config\.json"),
        ("no change", "the tuned model is the old base"),
        ("link", "'tokenizer.json' in '.*' is a link out of the folder"),
    ],
)
def test_bad_input_gives_one_line(trio, tmp_path, what, words):
    _break(trio, what)
    with pytest.raises(rt.RetargetError, match=words):
        port(trio, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".out.work").exists()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("missing", "lacks 'model-00002-of-"),
        ("unnamed", "disagree: 'extra' is only in the shard"),
        ("unkept", "disagree: 'extra' is only in the index"),
        ("outside", r"names '\.\./a\.safetensors', which is not a safetensors file beside it"),
    ],
)
def test_an_index_must_agree_with_its_shards_for_every_command(tmp_path, capsys, what, words):
    trio = save_trio(tmp_path, max_shard_size="8KB")
    folder = trio["new_base"]
    index, shard = folder / "model.safetensors.index.json", sorted(folder.glob("model-00002-*.safetensors"))[0]
    content = json.loads(index.read_text())
    if what == "missing":
        shard.unlink()
    elif what == "unnamed":
        save_file(load_file(shard) | {"extra": torch.ones(2)}, shard, {"format": "pt"})
    elif what == "unkept":
        content["weight_map"]["extra"] = shard.name
    else:
        content["weight_map"]["extra"] = "../a.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(rt.ModelError, match=words):
        port(trio, tmp_path / "out")
    with pytest.raises(SystemExit) as left:
        main([*options_of(trio), "--data", "none", "--out", str(tmp_path / "out")], standalone_mode=True)
    assert left.value.code == 1
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("Error: ")
    assert not (tmp_path / "out").exists()


def options_of(trio) -> list[str]:
    return ["port", *(text for side, folder in trio.items() for text in (f"--{side.replace('_', '-')}", str(folder)))]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"overrides": {"port.method": "fgmt"}}, "only a naive port"),
        ({"overrides": {"finetune.steps": 3}}, "only a naive port"),
        ({"overrides": {"port.targets": "teacher"}}, "--targets has no meaning"),
        ({"tuned_target": "x"}, "--tuned-target has no meaning"),
        ({"also_data": "x"}, "--also-data has no meaning"),
    ],
)
def test_options_that_need_images(trio, tmp_path, options, words):
    with pytest.raises(rt.PortError, match=words):
        port(trio, tmp_path / "out", **options)


def test_a_folder_with_enough_space_is_required(trio, tmp_path, monkeypatch):
    with pytest.raises(rt.PortError, match="give out="):
        port(trio, None)
    monkeypatch.setattr("shutil.disk_usage", lambda place: type("Room", (), {"free": 10})())
    with pytest.raises(rt.PortError, match="name another folder"):
        port(trio, tmp_path / "out")
    with pytest.raises(rt.PortError, match="add --data none"):
        rt.port("a", "b", "c", "cub", force_relation=True)


def test_sharded_classifiers_are_loaded(tmp_path, labelled, vit):
    whole = load_checkpoint(vit)
    names = list(whole.weights)
    (tmp_path / "sharded").mkdir()
    for number, part in enumerate((names[:9], names[9:])):
        save_file({name: whole.weights[name] for name in part}, tmp_path / "sharded" / f"{number}.safetensors")
    places = {name: f"{int(number >= 9)}.safetensors" for number, name in enumerate(names)}
    (tmp_path / "sharded" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (tmp_path / "sharded" / "config.json").write_bytes((vit / "config.json").read_bytes())
    found = load_checkpoint(tmp_path / "sharded").weights
    assert all(torch.equal(each, found[name]) for name, each in whole.weights.items())
    assert (
        rt.check(vit, tmp_path / "sharded", vit).compatible is False
    )  # because it is the old base; nothing else is wrong


# ---- what a stranger's tuned model may not do


@pytest.mark.parametrize("stored", [False, True])
def test_a_copy_of_tied_embeddings_leaves_them_tied(tmp_path, stored):
    """A tuned model saved with untied embeddings records it in config.json; the result has one tied table."""
    trio = save_trio(tmp_path, tie_word_embeddings=True)
    rewrite(trio["src_ft"], lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    if stored:
        rewrite(trio["src_base"], lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    change_config(trio["src_ft"], tie_word_embeddings=False)
    port(trio, tmp_path / "out")
    _, about = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert about["missing_keys"] == set()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True


def test_configuration_entries_that_load_something_are_not_copied(trio, tmp_path):
    change_config(trio["src_ft"], _attn_implementation="evil/kernel", quantization_config={"load_in_4bit": True})
    done = port(trio, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.keys() & {"_attn_implementation", "quantization_config"} == set()
    assert sum("not copied" in note for note in done.document.notes) == 2


def test_a_tuned_model_of_another_base_is_refused(trio, tmp_path):
    save_lm(make_lm(9), trio["src_ft"])
    with pytest.raises(rt.PortError, match=r"does not resemble the old base.*--src-base"):
        port(trio, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    done = port(trio, tmp_path / "out", force_relation=True)
    assert done.verdict.startswith("Check first: the tuned model does not resemble the old base")


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.bias"])
def test_a_new_base_with_more_layers_is_another_architecture(trio, tmp_path, name):
    rewrite(trio["new_base"], lambda weights: weights.update({name: torch.ones(4)}))
    with pytest.raises(rt.ModelError, match="one architecture"):
        port(trio, tmp_path / "out")


def test_transformers_modules_give_a_folder_it_loads(trio, tmp_path):
    sides = (AutoModelForCausalLM.from_pretrained(trio[side]) for side in ("src_base", "src_ft", "new_base"))
    rt.port(*sides, "none", out=tmp_path / "out")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, tensor in add(trio).items():
        assert torch.equal(found.state_dict()[name], tensor)


def test_check_supports_ports_without_images(trio, tmp_path):
    sides = [trio[side] for side in ("src_base", "src_ft", "new_base")]
    found = rt.check(*sides, "none")
    assert found.compatible
    assert found.relation.word == "same lineage"
    assert found.sides["tuned"].architecture == "LlamaForCausalLM"
    save_lm(make_lm(9), trio["new_base"])
    assert "independent" in rt.check(*sides, "none").problems[0]
    net = timm.create_model("test_resnet", num_classes=3)
    for side in sides:
        save_model(tmp_path / f"{side.name}-resnet", net.state_dict(), load_checkpoint(net))
    assert "BatchNorm" in rt.check(*(tmp_path / f"{side.name}-resnet" for side in sides), "none").problems[0]


def test_an_empty_index_is_refused(trio, tmp_path):
    (trio["src_ft"] / "model.safetensors").unlink()
    (trio["src_ft"] / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(rt.ModelError, match=r"index\.json' names no files"):
        port(trio, tmp_path / "out")


def test_space_of_finished_shards_is_not_required_again(tmp_path, monkeypatch):
    trio, out = save_trio(tmp_path, max_shard_size="8KB"), tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr("hf_retarget.porting.streamed.write_index", lambda *_: _interrupt())
        with pytest.raises(KeyboardInterrupt):
            port(trio, out)
    taken = sum(path.stat().st_size for path in (tmp_path / ".out.work" / "model").glob("*.safetensors"))
    asked = []
    monkeypatch.setattr("hf_retarget.porting.streamed.check_room", lambda folder, needed: asked.append(needed))
    port(trio, out, resume=True)
    assert taken > 0
    assert asked[0] <= 0


def _interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize("damage", ["flip", "empty", "link", "folder"])
def test_damaged_files_of_an_interrupted_run_are_rewritten(trio, tmp_path, monkeypatch, damage):
    port(trio, tmp_path / "whole")
    out, work = tmp_path / "out", tmp_path / ".out.work" / "model"
    with monkeypatch.context() as patched:
        patched.setattr("hf_retarget.porting.streamed.write_index", lambda *_: _interrupt())
        with pytest.raises(KeyboardInterrupt):
            port(trio, out)
    path = work / "model.safetensors"
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[-9] ^= 4
        path.write_bytes(content)
    else:
        path.unlink()
        if damage == "empty":
            path.touch()
        elif damage == "link":
            path.symlink_to(trio["src_ft"] / "model.safetensors")
        else:
            path.mkdir()
    (work / "evil.py").write_text("")
    port(trio, out, resume=True)
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert {path.name for path in out.iterdir()} == {path.name for path in (tmp_path / "whole").iterdir()}


def test_a_tensor_without_rows_is_not_a_head(trio, tmp_path):
    rewrite(trio["src_ft"], lambda w: w.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(0, 16)}))
    with pytest.raises(rt.ModelError, match="up_proj"):
        port(trio, tmp_path / "out")


def test_a_folder_named_notes_is_ignored(trio, tmp_path, monkeypatch):
    (tmp_path / "notes").mkdir()
    monkeypatch.chdir(tmp_path)
    port(trio, tmp_path / "out")


def test_a_panicking_tokenizer_gives_one_line(trio, tmp_path):
    path = trio["src_ft"] / "tokenizer.json"
    content = json.loads(path.read_text())
    unknown = {"id": "X", "ids": [99], "tokens": ["X"]}
    single = [{"SpecialToken": {"id": "Y", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": single,
        "special_tokens": {"X": unknown},
    }
    path.write_text(json.dumps(content))
    (tmp_path / "texts.txt").write_text("abc def\nghi jkl\n")
    with pytest.raises(rt.ModelError, match=r"tokenizer\.json.* cannot be used"):
        port(trio, tmp_path / "out", text=tmp_path / "texts.txt")

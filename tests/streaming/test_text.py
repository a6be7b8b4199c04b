"""Texts that measure how much of a fine-tuning was kept: the measurement, its output, and what is refused."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest
import torch
from tiny_lm import WORDS, make_lm, save_lm, save_trio, shake
from transformers import AutoModelForCausalLM

import hf_retarget as rt
from hf_retarget.document import read_document
from hf_retarget.models.transformers_models import load_language_model
from hf_retarget.streaming.text import MOST, judge_texts, measure_texts, read_texts

SIDES = ("source", "tuned", "target", "port")


@pytest.fixture
def texts(tmp_path):
    """Thirty texts of twenty letters."""
    draw = random.Random(0)
    path = tmp_path / "texts.txt"
    path.write_text("\n".join("".join(draw.choice("abcde") for _ in range(20)) for _ in range(30)))
    return path


def learn(model, scale=4.0):
    """The same model, but with a preference for the first letters."""
    other = shake(model, 0.0, 0)
    with torch.no_grad():
        hidden = model(torch.arange(5)[None], output_hidden_states=True).hidden_states[-1][0].mean(0)
        other.lm_head.weight[:5] += scale * hidden / hidden.square().sum()
    return other


@pytest.fixture
def taught(tmp_path):
    """An old base, a model that has learnt the first five letters, and a slightly different new base."""
    old = make_lm()
    sides = {"src_base": old, "src_ft": learn(old), "new_base": shake(old, 0.05, 2)}
    return {side: save_lm(model, tmp_path / side) for side, model in sides.items()}


def port(trio, out, **options):
    return rt.port(*(trio[side] for side in ("src_base", "src_ft", "new_base")), "none", out=out, **options)


def test_the_share_kept_is_in_every_output(taught, texts, tmp_path):
    done = port(taught, tmp_path / "out", text=texts)
    facts = read_document(tmp_path / "out" / "port.json").text
    assert (facts.name, facts.texts, facts.tokens) == ("texts.txt", 30, 30 * 19)
    folders = (*taught.values(), tmp_path / "out")
    for side, folder in zip(SIDES, folders, strict=True):
        model = AutoModelForCausalLM.from_pretrained(folder)
        tokens = torch.tensor([[WORDS.index(each) for each in line] for line in texts.read_text().split()])
        with torch.no_grad():
            assert facts.losses[side] == pytest.approx(float(model(tokens, labels=tokens).loss), rel=1e-5)
    share = (facts.losses["target"] - facts.losses["port"]) / (facts.losses["source"] - facts.losses["tuned"])
    assert facts.kept.value == pytest.approx(share)
    assert facts.gain.is_clear
    assert 0.7 < share < 1.3
    assert 0 < facts.kept.error < 0.1
    words = f"{share:.1%} (± {facts.kept.error:.1%}) of the fine-tuning's gain was kept"
    assert done.verdict.startswith(f"Worth it: {words}")
    for name in ("README.md", "report.html"):
        page = (tmp_path / "out" / name).read_text()
        assert "gain was kept" in page
        assert "loss per token" in page


def test_independent_bases_are_reported_to_keep_nothing(taught, texts, tmp_path):
    taught["new_base"] = save_lm(make_lm(7), tmp_path / "other")
    done = port(taught, tmp_path / "out", text=texts, force_relation=True)
    assert done.verdict.startswith("Check first: these bases are independent")
    assert "Not worth it" in done.verdict
    assert done.document.text.kept.value < 0.3


def test_without_a_gain_there_is_no_share(taught, tmp_path, texts):
    save_lm(learn(make_lm(), -4.0), taught["src_ft"])
    done = port(taught, tmp_path / "out", text=texts)
    assert done.document.text.kept is None
    assert "not shown to be better on these texts" in done.document.text.why
    assert "Undecided" in done.verdict


def test_the_error_of_the_share_matches_repeated_draws():
    """The jackknife, against the spread of the share over many sets of texts."""
    draw = torch.Generator().manual_seed(0)
    shares, errors = [], []
    for _ in range(200):
        hard = 3 + torch.randn(40, generator=draw)
        gain, kept = 1 + 0.3 * torch.randn(40, generator=draw), 0.6 + 0.3 * torch.randn(40, generator=draw)
        losses = {"source": 10 * hard, "tuned": 10 * (hard - gain), "target": 10 * hard, "port": 10 * (hard - kept)}
        facts = measure_texts("t", [[0] * 11] * 40, {side: each.tolist() for side, each in losses.items()})
        shares.append(facts.kept.value)
        errors.append(facts.kept.error)
    spread = float(torch.tensor(shares).std())
    assert spread == pytest.approx(sum(errors) / len(errors), rel=0.2)
    assert sum(shares) / len(shares) == pytest.approx(0.6, abs=0.02)


@pytest.mark.parametrize(
    ("kept", "words"), [(0.9, "Worth it"), (0.3, "Kept in part"), (0.1, "Not worth it"), (0.0, "Not worth it")]
)
def test_the_verdict(kept, words):
    noise = [0.01 * number for number in range(20)]
    losses = {"source": 3.0, "tuned": 2.0, "target": 2.9, "port": 2.9 - kept}
    sums = {
        side: [5 * (value + (0.1 * each if side == "port" else 0)) for each in noise] for side, value in losses.items()
    }
    facts = measure_texts("t", [[0] * 6] * 20, sums)
    assert judge_texts(facts).startswith(words)


def test_texts_from_lines_and_json(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\n two \nthree" + "\nx" * MOST)
    assert read_texts(tmp_path / "a.txt")[:3] == ["one", " two ", "three"]
    assert len(read_texts(tmp_path / "a.txt")) == MOST
    (tmp_path / "a.jsonl").write_text('{"text": "one\\nmore"}\n\n{"text": "two", "more": 1}\n')
    assert read_texts(tmp_path / "a.jsonl") == ["one\nmore", "two"]
    (tmp_path / "b.jsonl").write_bytes('\ufeff{"text": "one\u2028more"}\r\n{"text": "two"}'.encode())
    assert read_texts(tmp_path / "b.jsonl") == ["one\u2028more", "two"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"one line\n", "fewer than two texts"),
        ("a.txt", b"a\nb\n", "have more than one token"),
        ("a.txt", b"\xff\xfe\x00", "cannot be read"),
        ("a.jsonl", b'{"text": "a b"}\n["text"]\n', "line 2 of .* is not a JSON object with a string as 'text'"),
        ("a.jsonl", b"{no", "line 1"),
    ],
)
def test_bad_texts_are_refused_before_anything_is_written(taught, tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(rt.DataError, match=words):
        port(taught, tmp_path / "out", text=tmp_path / name)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".out.work").exists()


def test_models_that_cannot_read_texts_are_refused(tmp_path, texts):
    trio = save_trio(tmp_path)
    for folder in trio.values():
        (folder / "tokenizer.json").unlink()
    with pytest.raises(rt.ModelError, match=r"--text needs a tokenizer, and .* has no tokenizer\.json"):
        port(trio, tmp_path / "out", text=texts)
    (trio["src_ft"] / "tokenizer.json").write_text('{"model": {"type": "Magic"}}')
    with pytest.raises(rt.ModelError, match=r"tokenizer\.json in .* cannot be used"):
        port(trio, tmp_path / "out", text=texts)
    config = json.loads((trio["new_base"] / "config.json").read_text())
    (trio["new_base"] / "config.json").write_text(json.dumps(config | {"model_type": "vit"}))
    with pytest.raises(rt.ModelError, match="not one of transformers' language models"):
        port(trio, tmp_path / "out", text=texts)
    with pytest.raises(rt.PortError, match="add --data none"):
        rt.port(*trio.values(), "cub", text=texts)


def test_texts_are_truncated_to_the_models_limit(tmp_path, texts):
    """GPT-2 cannot read beyond its table of positions."""
    trio = save_trio(tmp_path, "gpt2", max_position_embeddings=12)
    facts = port(trio, tmp_path / "out", text=texts).document.text
    assert (facts.texts, facts.tokens) == (30, 30 * 11)


def test_tokens_unknown_to_the_old_base(tmp_path, texts):
    old = make_lm()
    trio = {
        "src_base": save_lm(old, tmp_path / "old"),
        "src_ft": save_lm(shake(old, 0.05, 1, len(WORDS) + 1), tmp_path / "tuned", [*WORDS, "!"]),
        "new_base": save_lm(shake(old, 0.02, 2), tmp_path / "new"),
    }
    port(trio, tmp_path / "out", text=texts)
    texts.write_text("abc\nabc!\n")
    with pytest.raises(rt.DataError, match=r"text 2 in .* has the token '!', which some models lack"):
        port(trio, tmp_path / "again", text=texts)


# ---- files of strangers


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"_attn_implementation": "kernels-community/evil"}, "may not decide what is loaded or run"),
        ({"quantization_config": {"quant_method": "gptq"}}, "may not decide what is loaded or run"),
        ({"num_hidden_layers": 10**6}, "at most 1,000 is accepted"),
        ({"hidden_size": 2**19, "intermediate_size": 2**19}, "does not fit its weights|cannot be loaded"),
        ({"num_hidden_layers": 3}, "lacks 'model.layers.2"),
    ],
)
def test_a_configuration_determines_only_shapes(trio, texts, tmp_path, entries, words):
    path = trio["src_ft"] / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    with pytest.raises(rt.ModelError, match=words):
        port(trio, tmp_path / "out", text=texts)
    assert not (tmp_path / "out").exists()
    assert (tmp_path / ".out.work").exists() is ("weights" in words or "lacks" in words)  # those can be resumed


def test_code_pickles_and_adapters_beside_the_weights_are_ignored(trio, tmp_path):
    folder = trio["src_ft"]
    config = json.loads((folder / "config.json").read_text())
    trap = f"open({str(tmp_path / 'run')!r}, 'w')"
    (folder / "modeling_evil.py").write_text(trap)
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "run").encode() + b"'\ntR.")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "evil/evil"}')
    config |= {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil", "AutoConfig": "modeling_evil.Evil"}}
    files = [folder / "model.safetensors"]
    model = load_language_model(config, files, "tuned", torch.float32, 10_000)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not (tmp_path / "run").exists()


def test_the_command_prints_a_table_and_a_verdict(taught, texts, tmp_path):
    sides = [text for side, folder in taught.items() for text in (f"--{side.replace('_', '-')}", str(folder))]
    command = [sys.executable, "-m", "hf_retarget", "port", *sides, "--data", "none", "--text", str(texts)]
    done = subprocess.run([*command, "--out", str(tmp_path / "out")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "LOSS PER TOKEN" in done.stdout
    assert "Worth it:" in done.stdout
    assert "report.html" in done.stderr


def test_a_non_finite_loss_gives_one_line_and_keeps_the_sum(taught, texts, tmp_path, monkeypatch):
    broken = AutoModelForCausalLM.from_pretrained(taught["src_base"])
    broken.lm_head.weight.data *= 1e38
    save_lm(broken, tmp_path / "large")
    large = {**taught, "src_base": tmp_path / "large"}
    with pytest.raises(rt.NotFiniteError, match=r"the old base on text 1.*leave out --text"):
        port(large, tmp_path / "out", text=texts, force_relation=True)
    written = next((tmp_path / ".out.work" / "model").glob("*.safetensors")).stat().st_mtime_ns
    port(large, tmp_path / "out", resume=True, force_relation=True)
    assert (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns == written


@pytest.mark.parametrize("line", ['{"text": null}', '{"text": 3}', "[]"])
def test_an_entry_that_is_no_text_is_refused(tmp_path, line):
    (tmp_path / "texts.jsonl").write_text(f'{{"text": "a"}}\n{line}\n')
    with pytest.raises(rt.DataError, match="line 2"):
        read_texts(tmp_path / "texts.jsonl")

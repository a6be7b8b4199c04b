"""Names of files, formats and choices that several packages share. Imports nothing."""

from __future__ import annotations

MODEL_CONFIG = "config.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PORT, FINETUNE, PORT_ALL, PLANE = "port.json", "finetune.json", "port-all.json", "plane.json"
PERMUTATION, GRAPH, REPORT, RECIPE, CARD = (
    "permutation.safetensors",
    "graph.json",
    "report.html",
    "recipe.yaml",
    "README.md",
)
PORT_ALL_PAGE = "port-all.html"
TOKENIZER = "tokenizer.json"
COMPANIONS = (
    *(TOKENIZER, "tokenizer_config.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("chat_template.jinja", "chat_template.json", "generation_config.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)
"""Files of a model besides its weights and configuration that are copied along; none of them is code."""
INITIAL_HEAD = "initial_head.safetensors"
"""The head that a fine-tuning started from, needed by the head policy `given`."""

SPLITS = ("test", "validation", "train")
PRECISIONS = ("no", "bf16", "fp16")
DTYPES = ("float32", "float16", "bfloat16")
"""Types in which weights can be stored."""

START_HEADS = ("auto", "keep", "fresh", "zero")
"""The head a fine-tuning starts with. `keep`: the model's own. `fresh`: a seeded random one. `zero`: zeros. `auto`:
its own if the classes agree, else zeros, from which a port assumes that the fine-tuning started."""
PORT_HEADS = ("auto", "zero", "shared", "given", "own")
"""The head that both bases get before a port."""

TARGETS = ("auto", "labels", "teacher", "both")
"""The targets of a port: labels, the tuned model's predictions, or the mean of both."""

SAVE_AS = ("model", "lora")
"""What a port is saved as: a whole model, or an adapter of the new base."""

SIDES = {"source": "old base", "tuned": "tuned model", "target": "new base", "tuned_target": "tuned new base"}
"""The models of a port: names in code, and names for users."""

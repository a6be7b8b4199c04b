"""Names of files, formats and choices that several packages share. Importing this imports nothing else."""

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
"""Files that a model takes along besides its weights and its configuration; none of them is code."""
INITIAL_HEAD = "initial_head.safetensors"
"""The head that a fine-tuning began with: what the port's head policy `given` needs."""

SPLITS = ("test", "validation", "train")
PRECISIONS = ("no", "bf16", "fp16")
DTYPES = ("float32", "float16", "bfloat16")
"""What weights can be stored as."""

START_HEADS = ("auto", "keep", "fresh", "zero")
"""What a fine-tuning starts with. `keep`: the own head. `fresh`: a seeded random one. `zero`: zeros. `auto`: the
own if the classes agree, else zeros, which is also what a port takes for the start of the fine-tuning."""
PORT_HEADS = ("auto", "zero", "shared", "given", "own")
"""What both bases get for a head before a port."""

TARGETS = ("auto", "labels", "teacher", "both")
"""What a port aims at: the labels of the images, what the tuned model says about them, or the mean of both."""

SAVE_AS = ("model", "lora")
"""What a port becomes: a whole model, or an adapter of its new base."""

SIDES = {"source": "old base", "tuned": "tuned model", "target": "new base", "tuned_target": "tuned new base"}
"""What code calls the models of a port, and what people read."""

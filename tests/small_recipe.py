"""A recipe with everything that a plan reads, but no weights: it can be planned and not run."""

import json
from pathlib import Path
from typing import Any

import yaml

PIQA = [{"goal": f"Open jar {i}", "sol1": "turn the lid", "sol2": "turn the page", "label": i % 2} for i in range(4)]
MINE = """
task: mine
dataset_path: json
dataset_kwargs: {data_files: {test: nowhere.jsonl}}
test_split: test
fewshot_split: test
output_type: multiple_choice
process_docs: !function code.shout
doc_to_text: "{{goal}}"
doc_to_choice: ["{{sol1}}", "{{sol2}}"]
doc_to_target: "{{label}}"
num_fewshot: 0
metric_list: [{metric: acc}]
metadata: {version: 1}
"""
CODE = "def shout(dataset):\n    return dataset.map(lambda row: {'goal': row['goal'].upper()})\n"


def fields() -> dict[str, Any]:
    """The recipe's fields; a new dictionary for each caller."""
    return {
        "checkpoints": {"tiny": {"softmax": "softmax", "softpick": "./softpick"}},
        "quantizations": [
            {"method": "none"},
            {"methods": ["bnb"], "bits": [2, 8]},
            {"method": "gptq", "bits": 4},
            {"method": "hqq", "bits": 3},
        ],
        "tasks": ["piqa", "mine"],
        "task_folders": ["tasks"],
        "trust_task_code": True,
        "data": {"piqa": {"validation": "piqa.jsonl", "train": "train.jsonl"}, "mine": "mine.jsonl"},
        "calibration": {"source": "corpus.txt", "samples": 2, "length": 8},
        "device": "cpu",
    }


def config(attention: str) -> dict[str, Any]:
    """A config.json that rules nothing out."""
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    own = {} if attention == "softmax" else {"attn_implementation": attention}
    return {"model_type": "llama", **sizes, "num_attention_heads": 4, **own}


def write_recipe(folder: Path, **changes: Any) -> Path:
    """The recipe and its files in a folder; a change of None leaves a field out. Files that are there are kept."""
    content = {name: value for name, value in (fields() | changes).items() if value is not None}
    files = {
        **{f"{kind}/config.json": json.dumps(config(kind)) for kind in ("softmax", "softpick")},
        **{f"{kind}/model.safetensors": f"weights of {kind}" for kind in ("softmax", "softpick")},
        **{f"{kind}/tokenizer.json": "{}" for kind in ("softmax", "softpick")},
        **{f"{name}.jsonl": "".join(json.dumps(row) + "\n" for row in PIQA) for name in ("piqa", "train", "mine")},
        "tasks/mine.yaml": MINE,
        "tasks/code.py": CODE,
        "corpus.txt": "some words to calibrate with",
    }
    for name, text in files.items():
        if not (folder / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return folder / "recipe.yaml"

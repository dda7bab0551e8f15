"""Output of lm-eval's own command line on the mini softmax model and its HQQ 3-bit version, without our scorer.

python tests/lm_eval_import/lm_eval_cli.py FOLDER writes it; tests/lm_eval_import/output is what 0.4.13 wrote.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
OUTPUT = Path(__file__).parent / "output"
MODELS = {"softmax": None, "softmax-hqq-3": 3}
DOCUMENTS = 24
MINI = ("mini_arc_easy", "mini_lambada", "mini_piqa", "mini_sciq", "mini_wikitext")
# One call with plain tasks, and one with a group of two of them, and a tag.
CALLS = (",".join(MINI), "mini_choices,mini_answers")
FURTHER_TASKS = {
    "mini_choices.yaml": """\
group: mini_choices
task: [mini_piqa, mini_sciq]
aggregate_metric_list: [{metric: acc, weight_by_size: true}]
metadata: {version: 1.0}
""",
    "mini_generate.yaml": r"""task: mini_generate
tag: mini_answers
dataset_path: json
dataset_kwargs: {data_files: {test: mini_arc_easy.jsonl}}
test_split: test
fewshot_split: test
num_fewshot: 2
output_type: generate_until
doc_to_text: "Question: {{question}}\nAnswer:"
doc_to_target: "{{choices.text[choices.label.index(answerKey)]}}"
generation_kwargs: {until: ["\n"], max_gen_toks: 4, do_sample: false}
repeats: 2
filter_list:
  - name: strict-match
    filter: [{function: take_first}]
  - name: flexible-extract
    filter: [{function: regex, regex_pattern: "(\\w+)"}, {function: take_first}]
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true, ignore_case: true}]
metadata: {version: 3.0}
""",
}


def write_models(folder: Path) -> None:
    """The model, and a quantized one as a plain checkpoint, which any program can load."""
    import torch
    from transformers import AutoModelForCausalLM

    from qbench import load_checkpoint, quantize

    source = ROOT / "recipes/mini/softmax"
    for name, bits in MODELS.items():
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        if bits:
            quantized, _ = quantize(load_checkpoint(source), method="hqq", bits=bits, execution="dense")
            model.load_state_dict(quantized.state_dict())
        model.save_pretrained(folder / name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(source / file, folder / name / file)


def write_output(work: Path, output: str = "out", packages: Path | None = None, documents: int = DOCUMENTS) -> Path:
    """lm-eval's output for both models; packages: a folder with another lm-eval."""
    shutil.copytree(ROOT / "recipes/mini/tasks", work / "tasks")
    for name, text in FURTHER_TASKS.items():
        (work / "tasks" / name).write_text(text)
    write_models(work / "tasks/models")
    paths = [str(packages)] if packages else []
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(work / "datasets")}
    environment["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    for model in MODELS:
        for tasks in CALLS:
            arguments = f"pretrained=models/{model},dtype=float32,softmax_dtype=float32"
            line = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", arguments, "--tasks", tasks]
            line += ["--include_path", ".", "--limit", str(documents), "--device", "cpu", "--batch_size", "16"]
            line += ["--output_path", str(work / output), "--log_samples"]
            subprocess.run(line, cwd=work / "tasks", env=environment, check=True, capture_output=True, timeout=250)
    return work / output


def main(folder: Path) -> None:
    """Write the output without the fields that describe only this machine."""
    out = write_output(folder)
    for file in out.rglob("results_*.json"):
        content = json.loads(file.read_text())
        file.write_text(json.dumps(content | {"pretty_env_info": ""}, indent=1) + "\n")
    print(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

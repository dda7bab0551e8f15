"""The workflow and the job for GPU runners in docs/gate.md are valid YAML, and call only commands that exist."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def test_the_workflow_runs_targets_of_the_makefile() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/gate.yml").read_text())
    runs = [step["run"] for step in workflow["jobs"]["gate"]["steps"] if "run" in step]
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert runs == ["make lint", "make test", "make check"]
    assert {"test", "check"} <= set(targets)


def test_the_gpu_job_is_yaml_and_names_recipes_that_exist() -> None:
    section = (ROOT / "docs" / "gate.md").read_text().partition("## On your own GPU runner")[2]
    (job,) = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)[0]).values()
    runs = " ".join(step.get("run", "") for step in job["steps"])
    recipes = re.findall(r"recipes/\S+\.yaml", runs)
    assert recipes
    assert all((ROOT / recipe).exists() for recipe in recipes)

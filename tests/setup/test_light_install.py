"""What a check needs is small: pinned requirements without torch, and the action that installs them."""

import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
OUTPUT = ROOT / "tests/lm_eval_import/output"
RUN, BASELINE = OUTPUT / "models__softmax-hqq-3", OUTPUT / "models__softmax"
PINS = dict(
    re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "requirements-check.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)
)
LARGE = (
    "torch",
    "transformers",
    "lm_eval",
    "datasets",
    "scipy",
    "pandas",
    "matplotlib",
    "huggingface_hub",
    "tqdm",
    "psutil",
)
# In a process without these packages: an import of one fails, as it would where they are not installed.
BLOCKED = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
from qbench import cli
sys.exit(cli.main(sys.argv[1:]))
"""
MINI = str(ROOT / "results/mini")
COMMANDS = {
    "check": (["check", str(RUN), str(BASELINE)], 1),
    "check records": (["check", MINI, "--baseline", "{copy}"], 0),
    "table": (["table", MINI, "--kind", "damage"], 0),
    "page": (["table", MINI, "--format", "html", "--out", "{folder}/page.html"], 0),
    "audit": (["audit", MINI], 0),
    "import": (["import", "lm-eval", str(OUTPUT), "--out", "{folder}/records"], 0),
    "imported table": (["table", "{folder}/records", "--kind", "baseline"], 0),
    "accept": (["accept", "{folder}/records", "--baseline", "{folder}/base", "--reason", "first"], 0),
    "compare": (["compare", str(ROOT / "results/paper"), "--with", str(ROOT / "results/paper")], 0),
    "help": (["--help"], 0),
}


def commands(folder: Path, names: tuple[str, ...] = tuple(COMMANDS)) -> list[tuple[list[str], int]]:
    """The commands with their exit codes, in an order in which they work."""
    copy = folder / "copy"
    subprocess.run(["cp", "-r", MINI, copy], check=True)
    return [([part.format(folder=folder, copy=copy) for part in COMMANDS[n][0]], COMMANDS[n][1]) for n in names]


def test_the_pins_are_those_of_the_whole_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    whole = dict(re.findall(r"([\w-]+)==([\w.]+)", "\n".join(project)))
    assert {name: PINS[name] for name in ("numpy", "tabulate")} == {name: whole[name] for name in ("numpy", "tabulate")}
    assert PINS.keys().isdisjoint(LARGE)


def test_commands_of_a_check_import_nothing_large(tmp_path: Path) -> None:
    """The fast part of the slow test below: one process, in which the packages cannot be imported."""
    script = BLOCKED.format(blocked=LARGE)
    for line, code in commands(tmp_path, ("check", "import", "imported table")):
        done = subprocess.run([sys.executable, "-c", script, *line], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == code, f"{line}: {done.stdout}{done.stderr}"


def test_the_guard_would_notice(tmp_path: Path) -> None:
    """`qbench power` needs SciPy, and reports if it is missing."""
    line = [sys.executable, "-c", BLOCKED.format(blocked=LARGE), "power", MINI]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert "scipy" in done.stderr


@pytest.fixture(scope="module")
def action(tmp_path_factory: pytest.TempPathFactory) -> "Action":
    """The action after its first step, as GitHub's runner has it: a copy of the repository elsewhere."""
    return Action(tmp_path_factory.mktemp("runner"))


class Action:
    """The steps of action.yml, run as GitHub's runner does."""

    def __init__(self, folder: Path) -> None:
        """Copy the repository's files, and install."""
        self.content = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
        self.folder = folder
        for name in ("_actions", "_temp", "work"):
            (folder / name).mkdir()
        files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
        self._copy(files.decode().split("\0"))
        self.steps = [step for step in self.content["runs"]["steps"] if "run" in step]
        started = time.monotonic()
        self.installed = self.step(0, {})
        self.seconds = time.monotonic() - started

    def _copy(self, files: list[str]) -> None:
        for name in files:
            if name and not name.startswith(("results/", "recipes/", "tests/")):
                target = self.folder / "_actions" / name
                target.parent.mkdir(parents=True, exist_ok=True)
                copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile  # git lists a link to a folder
                copy(ROOT / name, target)

    @property
    def environment(self) -> Path:
        """Where it installs."""
        return self.folder / "_temp/qbench"

    def step(self, number: int, inputs: dict[str, str]) -> subprocess.CompletedProcess[str]:
        """Run a step in a plain folder, with no packages of ours on the path."""
        step = self.steps[number]
        given = {name: str(own.get("default", "")) for name, own in self.content["inputs"].items()} | inputs
        own = {
            name: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda m: given[m[1]], v)
            for name, v in step.get("env", {}).items()
        }
        known = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL"))}
        known |= {
            "PATH": f"{self.folder / '_python'}{os.pathsep}{os.environ['PATH']}",
            "RUNNER_TEMP": str(self.folder / "_temp"),
            "GITHUB_ACTION_PATH": str(self.folder / "_actions"),
            "GITHUB_ACTIONS": "true",
            "GITHUB_STEP_SUMMARY": str(self.folder / "_temp/summary.md"),
        }
        python = self.folder / "_python"  # what setup-python provides
        python.mkdir(exist_ok=True)
        if not (python / "python").exists():
            (python / "python").symlink_to(Path(sys.base_prefix) / "bin/python3")
        script = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        return subprocess.run(script, cwd=self.folder / "work", env=known | own, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_action_checks_in_a_plain_folder(action: Action) -> None:
    assert action.installed.returncode == 0, action.installed.stderr
    work = action.folder / "work"
    for name, folder in {"new": RUN, "old": BASELINE}.items():
        subprocess.run(["cp", "-r", folder, work / name], check=True)
    worse = action.step(1, {"run": "new", "baseline": "old", "junit": "gate.xml"})
    assert worse.returncode == 1, worse.stderr
    assert re.search(r"^::error.*word_perplexity", worse.stdout, re.MULTILINE)
    assert "FAIL" in (action.folder / "_temp/summary.md").read_text()
    assert "<testsuite" in (work / "gate.xml").read_text()
    tolerances = "accuracy=90,perplexity=900,gold_logprob=9,pooled=99"
    assert action.step(1, {"run": "new", "baseline": "old", "tolerances": tolerances}).returncode == 0
    assert action.step(1, {"run": "new", "baseline": "old", "alpha": "1e-12"}).returncode == 0
    for asked in ({"noninferiority": "accuracy=1"}, {"max-damage": "perplexity=2"}, {"min-documents": "100"}):
        loose = {"tolerances": tolerances, "run": "new", "baseline": "old"}
        refused = action.step(1, loose | asked)
        assert refused.returncode == 1, (asked, refused.stdout, refused.stderr)
    hostile = action.step(1, {"run": "$(touch hacked)", "baseline": "--help"})
    assert hostile.returncode == 2
    assert not (work / "hacked").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_light_install_is_small_and_does_all_that_a_check_needs(action: Action, tmp_path: Path) -> None:
    size = sum(file.lstat().st_size for file in action.environment.rglob("*") if file.is_file()) / 1e6
    print(f"installed in {action.seconds:.0f} s, {size:.0f} MB")
    assert size < 300
    assert action.seconds < 60
    assert not list(action.environment.glob("lib/python*/site-packages/torch*"))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    for line, code in commands(tmp_path):
        done = subprocess.run(
            [action.environment / "bin/qbench", *line], cwd=tmp_path, env=clean, capture_output=True, text=True
        )
        assert done.returncode == code, f"{line}: {done.stdout}{done.stderr}"

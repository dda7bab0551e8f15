"""The documentation is true: its commands and examples run, its tables are what commands print, its links work."""

import argparse
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from qbench import cli
from qbench.recipe.cells import load_recipe

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
PAGES = [README, *DOCS, CONTRIBUTING, ROOT / "CHANGELOG.md", *ROOT.glob("re*/*/README.md")]

# A fenced block, with the line before it if that ends with a file's name: the block is that file.
BLOCK = re.compile(r"(?:^(?P<before>.*)`(?P<file>[\w./]+)`:\n\n)?^```(?P<kind>\w*)\n(?P<text>[\s\S]*?)^```$", re.M)
LINK = re.compile(r"\]\(([^)\s]+)\)")
ONLY_PARSED = {"On a GPU"}  # needs a GPU and the Hub: only check that these are commands
NEEDS_OPTIMUM = "Who else reads the folders"
OTHER_REPOSITORY = "In your own repository"  # tests/setup/test_wheel.py runs it, outside the clone
# Sections of docs whose commands are run; the others are only parsed.
TUTORIALS = {
    ("recipes.md", "A task of your own"),
    ("quantizers.md", "Adding one"),
    ("tables.md", ""),
    ("CONTRIBUTING.md", "A kind of table"),
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    kind: str
    text: str
    file: str | None
    added: bool  # to an existing file

    @property
    def commands(self) -> list[str]:
        """The commands of a shell block, without comments."""
        lines = self.text.splitlines() if self.kind in ("", "sh") else []
        return [command for line in lines if (command := re.sub(r"(^|\s+)#.*", "", line))]

    def exit_code(self, command: str) -> int:
        """What the comment after a command says, or else 0."""
        said = re.search(rf"^{re.escape(command)} +# exit code (\d)", self.text, re.M)
        return int(said[1]) if said else 0


def sections(page: Path) -> dict[str, list[Block]]:
    """The blocks under each heading."""
    first, *parts = re.split(r"^##+ (.*)$", page.read_text(encoding="utf-8"), flags=re.M)
    texts = {"": first} | dict(zip(parts[::2], parts[1::2], strict=True))
    return {title: found for title, text in texts.items() if (found := blocks(text))}


def blocks(text: str) -> list[Block]:
    """The blocks in a text."""
    return [
        Block(found["kind"], found["text"], found["file"], "dded to" in (found["before"] or ""))
        for found in BLOCK.finditer(text)
    ]


class Clone:
    """A copy of the repository as a newcomer has it, without what git ignores; `qbench` and `python` are these here."""

    def __init__(self, folder: Path) -> None:
        """Make it."""
        self.folder = folder
        shutil.copytree(ROOT / "qbench", folder / "qbench", ignore=shutil.ignore_patterns("__pycache__"))
        for name in (
            "recipes",
            "kernels",
            "scripts",
            "docs",
            "Makefile",
            "pyproject.toml",
            "results/mini",
            "results/paper",
            "tests/lm_eval_import/output",
        ):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(ROOT / name)
        commands = folder / "commands"
        commands.mkdir()
        for name, arguments in {"python": "", "qbench": "-m qbench.cli"}.items():
            (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
            (commands / name).chmod(0o755)
        self.environment = os.environ | {
            "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(str(folder / part) for part in (".", "kernels")),
            "HF_HUB_OFFLINE": "1",
        }

    def shell(self, command: str) -> str:
        """What a command prints; it must succeed."""
        done = subprocess.run(
            ["sh", "-c", command], cwd=self.folder, env=self.environment, text=True, capture_output=True, check=False
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def write(self, block: Block) -> None:
        """Make the file that a block is."""
        assert block.file
        file = self.folder / block.file
        file.parent.mkdir(exist_ok=True)
        assert file.exists() == block.added, f"{block.file} is there already"
        with file.open("a", encoding="utf-8") as handle:
            handle.write("\n\n" * block.added + block.text)

    @staticmethod
    def python(text: str) -> None:
        """Run a script, with this process' packages: its imports take longer than it does."""
        exec(compile(text, "<example>", "exec"), {"__name__": "__main__"})


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clone:
    """A clone, which is the working folder too."""
    made = Clone(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    return made


def is_make(command: str) -> bool:
    return command.startswith("make ")


# A run starts with ten seconds of imports. One is enough for `make test`: the quantizer's, whose code is in a clone.
SLOW = {"Your own models", "A task of your own", "Why quantization hurts"}
RUN = [
    pytest.param(page, title, marks=[pytest.mark.slow] * (title in SLOW), id=f"{page.stem}: {title}")
    for page in (README, CONTRIBUTING, *DOCS)
    for title in sections(page)
    if (page.name, title) in TUTORIALS or (page == README and title not in ONLY_PARSED)
]


@pytest.mark.parametrize(("page", "title"), RUN)
def test_examples_run(page: Path, title: str, clone: Clone) -> None:
    """In their order on the page; `make` is a dry run here: the next test runs it."""
    found = sections(page)[title]
    own_code = any(str(block.file).startswith("qbench/") for block in found)
    for block in found:
        if block.file:
            clone.write(block)
        elif block.kind == "python":
            clone.python(block.text)
        for command in block.commands:
            if is_make(command):
                clone.shell(command.replace("make ", "make --dry-run "))
            elif own_code or not command.startswith("qbench ") or command.startswith("qbench run "):
                clone.shell(command)
            else:
                assert cli.main(shlex.split(command)[1:]) == block.exit_code(command)


def test_all_tutorials_are_there() -> None:
    assert {(page.name, title) for page in (CONTRIBUTING, *DOCS) for title in sections(page)} >= TUTORIALS


def test_the_recipes_of_the_examples_are_recipes(clone: Clone) -> None:
    pages = [README, *(ROOT / "docs" / name for name in ("recipes.md", "quantizers.md"))]
    written = [block for page in pages for found in sections(page).values() for block in found if block.file]
    files = [block for block in written if block.kind in ("yaml", "json")]
    for block in files:
        clone.write(block)
    recipes = [str(block.file) for block in files if re.search(r"^(extends|checkpoints):", block.text, re.M)]
    assert recipes == ["mine.yaml", "pets.yaml", "minmax.yaml"]
    for recipe in recipes[:2]:  # the third has a method that is not here
        load_recipe(clone.folder / recipe)


def test_what_the_readme_says_about_your_own_recipe_is_true(clone: Clone) -> None:
    text = README.read_text(encoding="utf-8").partition("## Your own models")[2].partition("\n## ")[0]
    assert "`make setup`" in text
    clone.shell("make --dry-run setup")
    (entry,) = re.findall(r"`(\{method:.*?\}\})`", text)
    (block,) = [block for block in blocks(text) if block.kind == "yaml"]
    before, comment, example = block.text.partition("# The two lines below are the example's task.")
    after = comment + example
    assert len(after.splitlines()) == 3
    (tasks,) = re.findall(r"write: (tasks: .*)", after)
    recipe = f"{before}{tasks}\n".replace("  - method: none\n", f"  - method: none\n  - {entry}\n")
    (clone.folder / "mine.yaml").write_text(recipe)
    loaded = load_recipe(clone.folder / "mine.yaml")
    assert list(loaded.tasks) == ["arc_easy", "wikitext"]
    assert loaded.quantizations[1].options == {"group_size": 64}


def test_prose_of_the_gates_page_fits_120_columns() -> None:
    """Tables have rows as long as they need."""
    lines = (ROOT / "docs" / "gate.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []


def test_no_block_is_overlooked() -> None:
    for page in (README, *DOCS):
        found = [block for own in sections(page).values() for block in own]
        assert {block.kind for block in found} <= {"", "sh", "python", "yaml", "json"}
        assert len(re.findall(r"^```", page.read_text(encoding="utf-8"), re.M)) == 2 * len(found)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_make_bench_and_make_check_run(clone: Clone) -> None:
    """On the twins, with or without a GPU; `make test` is not run, since it runs this."""
    commands = {c for found in sections(README).values() for block in found for c in block.commands if is_make(c)}
    assert commands == {"make bench", "make check", "make test"}
    (clone.folder / ".venv").symlink_to(sys.prefix)
    here = "RECIPE=recipes/mini.yaml --old-file .venv/installed"  # set up already; must not change
    report = "results/runs/mini/report.html written"
    assert report in clone.shell(f"make bench {here} 2>&1")
    assert report in clone.shell(f"timeout 60 make bench {here} 2>&1"), "the second time it takes seconds"
    clone.shell(f"make check {here}")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_doctor_checks(clone: Clone) -> None:
    clone.shell("qbench doctor --checks")


class ParsedError(BaseException):
    """Raised instead of running the parsed command; not an Exception, which `main` would report as a bug."""


def parse(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the command line accepts it, and whether the recipe that it names is valid."""
    original = argparse.ArgumentParser.parse_args

    def parse_only(*arguments: object, **named: object) -> None:
        raise ParsedError(original(*arguments, **named))  # type: ignore[call-overload]

    with monkeypatch.context() as patched:
        patched.setattr(argparse.ArgumentParser, "parse_args", parse_only)
        with pytest.raises(ParsedError) as parsed:
            cli.main(shlex.split(command)[1:])
    if recipe := getattr(parsed.value.args[0], "recipe", None):
        load_recipe(ROOT / recipe)


def test_the_commands_for_a_gpu_are_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = [command for title in ONLY_PARSED for block in sections(README)[title] for command in block.commands]
    assert commands
    for command in commands:
        parse(command, monkeypatch)


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_the_examples_of_the_docs_run(page: Path, clone: Clone, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python as it stands; of shell, whether these are commands."""
    left = {title for name, title in TUTORIALS if name == page.name} | {NEEDS_OPTIMUM, OTHER_REPOSITORY}
    found = [block for title, own in sections(page).items() if title not in left for block in own]
    for command in (part for block in found for line in block.commands for part in line.split(" && ")):
        command = re.sub(r"^\w+=\S+ ", "", command)
        if is_make(command):
            clone.shell(command.replace("make ", "make --dry-run "))
        elif command.startswith("qbench "):
            parse(command, monkeypatch)
        elif script := re.match(r"python (\S+\.py) ", command):
            assert (ROOT / script[1]).is_file()
        else:
            assert page.name == "scoring.md", f"{command}: no test runs it"
    if scripts := [block.text for block in found if block.kind == "python"]:
        clone.python("\n".join(scripts))


@pytest.mark.slow
def test_the_example_with_optimum_runs(clone: Clone, optimum: Path) -> None:
    page = sections(ROOT / "docs" / "quantizers.md")
    assert [block.kind for block in page[NEEDS_OPTIMUM]] == ["python"]
    scripts = [block.text for own in page.values() for block in own if block.kind == "python" and not block.file]
    (clone.folder / "example.py").write_text("\n".join(scripts))
    clone.environment["PYTHONPATH"] += f"{os.pathsep}{optimum}"
    print(clone.shell("python example.py"))


@pytest.mark.slow
def test_lm_evals_command_line(clone: Clone) -> None:
    commands = [
        c for found in sections(ROOT / "docs" / "scoring.md").values() for block in found for c in block.commands
    ]
    assert "mini_piqa" in clone.shell("\n".join(commands))


def test_the_recipe_of_the_docs_is_one(tmp_path: Path) -> None:
    (example,) = [block for block in sections(ROOT / "docs" / "recipes.md")[""] if block.kind == "yaml"]
    file = tmp_path / "recipe.yaml"
    file.write_text(example.text)
    assert len(load_recipe(file).quantizations) == 3


@dataclass(frozen=True)
class Made:
    """What docs/tables.py generates from results/mini."""

    script: ModuleType
    summary: str
    page: str


@pytest.fixture(scope="module")
def made() -> Made:
    """Made from the root."""
    spec = importlib.util.spec_from_file_location("docs_tables", ROOT / "docs" / "tables.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        spec.loader.exec_module(module)
        return Made(module, module.summary(), module.page())


def test_the_tables_are_those_of_the_results(made: Made) -> None:
    """If this fails, results/mini or the tables' format has changed: `make docs` regenerates them."""
    readme = README.read_text(encoding="utf-8")
    assert made.script.with_table(readme, made.summary) == readme
    assert made.page == (ROOT / "docs" / "mini.md").read_text(encoding="utf-8")


def test_the_summary_has_the_numbers_of_the_long_tables(made: Made) -> None:
    """Every score and damage in README.md is also in docs/mini.md."""
    rows, _, _ = made.summary.partition("\n\n")
    numbers = re.findall(r"[-+]?\d+\.\d\d", rows)
    assert len(numbers) > 10
    for number in numbers:
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", made.page), number


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(re.sub(r"^```[\s\S]*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M)):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: {link}"


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_make_help_has_all_targets() -> None:
    done = subprocess.run(["make", "--silent", "help"], cwd=ROOT, text=True, capture_output=True, check=True)
    listed = re.findall(r"^  make (\S+) +\S", done.stdout, re.M)
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert phony
    assert sorted(listed) == sorted(phony[1].split())


def test_one_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "version", "references"} <= citation.keys()
    assert citation["version"] == version
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()

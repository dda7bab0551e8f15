"""`qbench check` asked for enough data: margins, limits of damage and a minimum of documents, on the command line."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qbench import cli
from qbench.gate.settings import GateSettings, Margins
from qbench.gate.verdict import check, parse_settings

from ..gate.made_up import Population, make_cells, write_cells
from ..messages import states
from .lm_eval_cli import MODELS, OUTPUT, ROOT

ALL = [str(OUTPUT / f"models__{model}") for model in reversed(MODELS)]  # run, baseline
LOOSE = ["--tolerances", "accuracy=90,perplexity=900,gold_logprob=9,pooled=99"]


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Run and baseline with 24 documents of mini_sciq, in which the run is 8.3 points worse."""
    folders = []
    for model in reversed(MODELS):
        folder = tmp_path_factory.mktemp("few") / model
        folder.mkdir()
        newest = max((OUTPUT / f"models__{model}").glob("samples_mini_sciq_*.jsonl"))
        shutil.copy(newest, folder)
        (results,) = newest.parent.glob(f"results_{newest.stem.rpartition('_')[2]}.json")
        content = json.loads(results.read_text())
        content["results"] = {"mini_sciq": content["results"]["mini_sciq"]}
        content = {name: own for name, own in content.items() if name not in ("groups", "group_subtasks")}
        (folder / results.name).write_text(json.dumps(content))
        folders.append(str(folder))
    return folders


def checked(folders: list[str], *options: str, tmp_path: Path) -> tuple[int, dict[str, Any]]:
    """The exit code, and the report for programs."""
    code = cli.main(["check", *folders, *options, "--json", str(tmp_path / "gate.json")])
    return code, json.loads((tmp_path / "gate.json").read_text())


def test_a_large_loss_of_few_documents_passes_unless_enough_data_is_asked_for(
    few: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = checked(few, tmp_path=tmp_path)
    assert (code, {row["verdict"] for row in report["scores"]}) == (0, {"unclear"})
    said = capsys.readouterr().out
    assert all(part in said for part in ("+8.33 points", "--noninferiority", "--min-documents"))

    code, report = checked(few, "--noninferiority", "accuracy=1", tmp_path=tmp_path)
    missed = {row["metric"]: row for row in report["scores"] if row["verdict"] == "not_excluded"}
    assert (code, set(missed)) == (1, {"acc", "acc_norm"})
    most = max(row["documents_needed"] for row in missed.values())
    assert 1000 < most < 10_000
    said = capsys.readouterr().out
    assert states(said, f"mini_sciq about {float(f'{most:.2g}'):,.0f} (it has 24)")
    assert "--min-documents" not in said

    code, report = checked(few, "--min-documents", "100", tmp_path=tmp_path)
    assert (code, len(report["failures"])) == (1, 1)
    assert states(report["failures"][0]["message"], "mini_sciq…24 documents…100")
    assert "24 documents" in capsys.readouterr().out
    assert checked(few, "--min-documents", "24", tmp_path=tmp_path)[0] == 0


def test_damage_of_lm_eval_output_is_counted_from_the_baseline(few: list[str], tmp_path: Path) -> None:
    for limit, code in (("2%", 1), ("50", 0)):
        found, report = checked(ALL, *LOOSE, "--max-damage", f"perplexity={limit}", tmp_path=tmp_path)
        damages = [row for row in report["scores"] if row["compared_with"] == "unquantized"]
        assert found == code
        assert {row["task"] for row in damages} == {"mini_lambada", "mini_wikitext"}
        assert all((row["verdict"] == "worse") == (code == 1) for row in damages)
    assert checked(few, "--max-damage", "accuracy=1", tmp_path=tmp_path)[0] == 0  # may be chance


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ("--noninferiority acuracy=1", "acuracy…Did you mean accuracy?"),
        ("--noninferiority accuracy=1%", "noninferiority.accuracy…'1%'…points"),
        ("--noninferiority accuracy", "--noninferiority…'accuracy'…accuracy=1"),
        ("--noninferiority accuracy=1,accuracy=2", "--noninferiority…accuracy twice"),
        ("--noninferiority=", "--noninferiority"),
        ("--noninferiority perplexity=1", "perplexity…no perplexity in common"),
        ("--max-damage perplexity=1", "max_damage…perplexity…applies to"),
        ("--max-damage hqq-3:accuracy=1", "hqq-3…no labels"),
        ("--max-damage kl=1", "max_damage…kl"),
    ],
)
def test_a_wrong_option_is_2(options: str, facts: str, few: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", *few, *options.split()]) == 2
    message = capsys.readouterr().err
    assert states(message, facts), message


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A run of our own and its baseline: the same records."""
    folder = tmp_path_factory.mktemp("own")
    for side in ("run", "baseline"):
        for label in ("none-16", "hqq-2-g64", "hqq-8-g64"):
            for cell in (ROOT / "results/mini").glob(f"*-softmax-{label}-*"):
                shutil.copytree(cell, folder / side / cell.name)
    return [str(folder / "run"), str(folder / "baseline")]


def test_options_mean_what_the_settings_of_a_recipe_mean(own: list[str], tmp_path: Path) -> None:
    options = ["--noninferiority", "accuracy=2,perplexity=1%", "--min-documents", "400"]
    options += ["--max-damage", "hqq-2-g64:accuracy=1 point,perplexity=2%", "--max-damage", "accuracy=20"]
    code, report = checked(own, *options, tmp_path=tmp_path)
    settings = {"noninferiority": {"accuracy": 2, "perplexity": "1%"}, "min_documents": 400}
    settings["max_damage"] = {"hqq-2-g64": {"accuracy": "1 point", "perplexity": "2%"}, "*": {"accuracy": 20}}
    assert report["settings"] == parse_settings(settings, "gate").model_dump()
    limits = {(row["cell"][-9:], row["tolerance"]) for row in report["scores"] if row["compared_with"] != "baseline"}
    assert limits == {("hqq-2-g64", 1.0), ("hqq-2-g64", 2.0), ("hqq-8-g64", 20.0)}
    failed = {row["cell"] for row in report["scores"] if row["verdict"] == "worse"}
    assert (code, failed) == (1, {"mini-softmax-hqq-2-g64"})
    assert report["failures"] == []
    assert (
        checked(own, "--max-damage", "hqq-8-g64:accuracy=1", "--noninferiority", "accuracy=2", tmp_path=tmp_path)[0]
        == 0
    )
    assert len(checked(own, "--min-documents", "401", tmp_path=tmp_path)[1]["failures"]) == 15  # 3 cells, 5 tasks


def test_copies_of_a_document_are_no_further_documents(tmp_path: Path) -> None:
    """60 rows, of which 51 are of one document."""
    samples = Population(60, ["piqa"]).samples()
    samples.loc[10:, "doc_hash"] = samples["doc_hash"][9]
    folders = [write_cells(tmp_path / name, {make_cells(1)[0]: samples}) for name in ("b", "r")]
    assert check(folders[1], folders[0], GateSettings(min_documents=10)).passed
    (failure,) = check(folders[1], folders[0], GateSettings(min_documents=11)).failures
    assert "10 documents" in failure.message


@pytest.mark.parametrize("changing", [0.02, 0.2])
def test_the_documents_needed_exclude_the_margin_as_often_as_promised(few: list[str], changing: float) -> None:
    """Answers that are lost as often as they are won: 80% of runs with so many documents exclude the margin."""
    report = check(*few, GateSettings(noninferiority=Margins(accuracy=2)))
    h = next(o.hypothesis for o in report.tested if o.hypothesis.metric == "acc")

    def drawn(documents: int, seed: int) -> Any:
        coins = np.random.default_rng(seed).uniform(size=documents)
        losses = np.where(coins < changing / 2, 1.0, np.where(coins > 1 - changing / 2, -1.0, 0.0))
        return replace(h, losses=losses, weights=np.ones(documents))

    some = replace(
        h,
        losses=np.repeat([1.0, -1.0, 0.0], [int(50 * changing), int(50 * changing), int(100 - 100 * changing)]),
        weights=np.ones(100),
    )
    needed = some.documents_needed
    assert needed is not None
    excluded = [np.mean([not drawn(n, seed).misses_margin for seed in range(400)]) for n in (needed, needed // 2)]
    assert 0.74 < excluded[0] < 0.92
    assert excluded[1] < 0.68
    assert drawn(4 * needed, 0).documents_needed is None  # there are enough

"""The gate: a run compared with its baseline, hypothesis by hypothesis."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import ValidationError

from qbench.errors import did_you_mean, some
from qbench.files import as_path
from qbench.gate.damage import damages
from qbench.gate.hypotheses import Hypothesis, hypotheses
from qbench.gate.imported import check_asked, read_both
from qbench.gate.pairing import CheckError, Joined, check_other_documents, join
from qbench.gate.pooled import with_pooled
from qbench.gate.settings import EVERY, PARTS, GateSettings
from qbench.gate.sign_flip import adjusted_p, holm, settle, sign_flip
from qbench.numbers import counted
from qbench.records.findings.finding import Finding, FoundBy
from qbench.records.findings.folder import Review
from qbench.records.findings.measured import Evidence
from qbench.records.findings.pairs import (
    CHECKPOINT,
    differences,
    of_audits,
    of_costs,
    of_documents,
    of_other_documents,
    of_parts,
    of_records,
    other_parts,
    other_versions,
)
from qbench.records.findings.record import altered
from qbench.records.findings.run import misplaced
from qbench.records.findings.weights import other_weights
from qbench.records.metrics import KL
from qbench.records.paired import OtherDocuments, Pair, pair_documents
from qbench.records.samples import WEIGHT
from qbench.records.schema import CellRef
from qbench.records.store import Results, StoredRecord
from qbench.validation import problem

if TYPE_CHECKING:
    import pandas as pd

Verdict = Literal["worse", "not_excluded", "better", "unclear", "same"]


@dataclass(frozen=True)
class TestedHypothesis:
    """A hypothesis and its outcome."""

    hypothesis: Hypothesis
    p: float
    adjusted_p: float  # over the whole table; 1 if it could not fail, whatever the signs of its losses
    # not_excluded: a loss above the required margin; unclear: the loss is above its tolerance, but may be chance
    verdict: Verdict


@dataclass(frozen=True)
class GateReport:
    """What a check found."""

    run: Path
    baseline: Path
    settings: GateSettings
    tested: tuple[TestedHypothesis, ...]
    findings: tuple[Finding, ...]  # of the run, and of what differs from its baseline
    other_recipe: tuple[str, ...]  # how the recipe or the gate's settings differ from the baseline's
    notes: tuple[str, ...]
    differences: dict[str, tuple[str, ...]]  # by the names of cells that failed: what else differs

    @property
    def failures(self) -> tuple[Finding, ...]:
        """What fails the check without a test."""
        return tuple(found for found in self.findings if found.fails)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """What fails nothing: costs."""
        return tuple(found for found in self.findings if found.found_by == "cost")

    @property
    def changed(self) -> tuple[str, ...]:
        """What a reader must know before the scores, such as a changed calibration."""
        return (*self.other_recipe, *(found.message for found in self.findings if found.found_by == "change"))

    @property
    def by_scores_alone(self) -> bool:
        """Whether a checkpoint differs from the baseline's, so its audits cannot be compared."""
        return any(found.rule == "other_checkpoint" for found in self.findings)

    @property
    def worse(self) -> tuple[TestedHypothesis, ...]:
        """The scores that fail the check."""
        return self._with("worse")

    @property
    def not_excluded(self) -> tuple[TestedHypothesis, ...]:
        """The scores that fail because a loss above their margin (gate.noninferiority) cannot be excluded."""
        return self._with("not_excluded")

    @property
    def least_sure(self) -> TestedHypothesis | None:
        """The score with the largest loss that cannot be excluded, in units of its tolerance; None without scores.

        Unchanged scores, of which no largest loss is known, count only if there are no others.
        """
        scores = [outcome for outcome in self.tested if outcome.hypothesis.is_score]
        known = [outcome for outcome in scores if not outcome.hypothesis.is_unchanged]
        return max(known or scores, key=lambda outcome: outcome.hypothesis.upper_in_tolerances, default=None)

    @property
    def unchanged(self) -> tuple[TestedHypothesis, ...]:
        """The scores of which no largest loss is known, because no document changed."""
        scores = (outcome for outcome in self.tested if outcome.hypothesis.is_score)
        return tuple(outcome for outcome in scores if outcome.hypothesis.is_unchanged)

    @property
    def better(self) -> tuple[TestedHypothesis, ...]:
        """The scores that got better by more than their tolerance."""
        return self._with("better")

    @property
    def unclear(self) -> tuple[TestedHypothesis, ...]:
        """Losses above their tolerance that may be chance."""
        return self._with("unclear")

    @property
    def passed(self) -> bool:
        """The verdict."""
        return not self.worse and not self.not_excluded and not self.failures

    def __repr__(self) -> str:
        """The verdict in one line."""
        outcome = "passed" if self.passed else "failed"
        scores = sum(tested.hypothesis.is_score for tested in self.tested)
        found = f"{len(self.worse)} worse, {len(self.better)} better, {len(self.unclear)} unclear"
        return f"GateReport({self.run} {outcome} against {self.baseline}: {counted(scores, 'score')}, {found})"

    def _repr_markdown_(self) -> str:
        """The whole report, for a notebook."""
        from qbench.gate.render import to_markdown

        return to_markdown(self)

    def to_frame(self) -> "pd.DataFrame":
        """One row per score that was compared."""
        import pandas as pd

        from qbench.gate.render import score

        return pd.DataFrame([score(outcome) for outcome in self.tested])

    def _with(self, verdict: Verdict) -> tuple[TestedHypothesis, ...]:
        return tuple(outcome for outcome in self.tested if outcome.verdict == verdict)


def check(
    run: Path | str,
    baseline: Path | str,
    settings: GateSettings | None = None,
    scores_only: bool = False,
    override: Mapping[str, Any] | None = None,
) -> GateReport:
    """Compare a folder of records, or lm-eval's output, with its baseline.

    settings: by default, those of the run's recipe. override: settings that replace some of these.
    """
    paths = [as_path(folder, "a folder of records", CheckError) for folder in (run, baseline)]
    now, then, notes = read_both(*paths)
    settings = settings or settings_of(now)
    if override:
        settings = parse_settings(_replaced(settings.model_dump(), override), "")
    joined = join(now, then, settings)
    for before, after in joined.pairs:
        check_asked(before, after)
    current = [after for _, after in joined.pairs]
    review = Review(current, then.current)
    changed = {_cell_of(pairs): other_parts(pairs) for pairs in joined.by_cell}
    found: list[Finding] = []
    table: list[Hypothesis] = []
    without_kl = _without_kl(now, then, joined)
    for pairs in joined.by_cell:
        for _, after in pairs:
            review.read(after)
        _check_altered(then, pairs)
        own, different = _compare(pairs, settings, ignore_kl=bool(without_kl))
        table += with_pooled(own, settings)
        found += different
        if not scores_only and CHECKPOINT not in changed[_cell_of(pairs)]:
            found += of_audits(pairs, settings, settings.alpha / len(joined.by_cell))
        found += [cost for before, after in pairs for cost in of_costs(before.record, after.record, settings)]
    table += damages(now, joined.pairs, settings)
    found = [*_unfinished(joined, now), *found, *of_parts(changed.items())]
    found += [own.of_the_baseline for own in other_weights(Evidence(review.evidence.references))]
    found = [*review.findings(found), *found]
    failures = [finding for finding in found if finding.fails]
    if not table and not failures:
        raise CheckError(f"{now.folder} and {then.folder} have no metric in common that the gate can test.")
    if not failures:  # nothing is tested in a task with different documents
        _check_overrides(settings, table, _tasks_with_kl(joined) if without_kl else set())
        _check_margins(settings, table)
        _check_limits(settings, table)
    few = list(_too_few(settings, table))
    tested = judge(table, settings)
    bad = {o.hypothesis.cell for o in tested if o.verdict in ("worse", "not_excluded")} | {
        failure.cell for failure in (*failures, *few)
    }
    return GateReport(
        run=now.folder,
        baseline=then.folder,
        settings=settings,
        tested=tested,
        findings=(*found, *few),
        other_recipe=(*_other_settings_of_the_gate(then, settings), *_other_recipe(joined)),
        notes=(*notes, *without_kl, *_notes(now, then, joined, settings, scores_only)),
        differences={
            cell.name: tuple(differences(before.record, after.record))
            for before, after in (*joined.failed, *joined.pairs)
            for cell in {after.record.cell, after.record.cell.of_all_draws} & bad
        },
    )


def judge(table: Sequence[Hypothesis], settings: GateSettings) -> tuple[TestedHypothesis, ...]:
    """Test the hypotheses of a table together: a loss above its tolerance and beyond chance is worse."""
    if not table:
        return ()
    losses = [hypothesis.loss for hypothesis in table]
    above = [loss > hypothesis.tolerance for loss, hypothesis in zip(losses, table, strict=True)]
    alphas = np.array([h.alpha for h in table])
    smallest = np.array([h.smallest_p for h in table])
    p = settle([h.losses for h in table], above, alphas, lambda i, p: table[i].with_calibration(p), smallest)
    adjusted = adjusted_p(p, smallest, alphas.max())
    # The same for improvements: nothing depends on them, so the bounds are enough.
    gained = [-loss > h.tolerance and h.limit is None for loss, h in zip(losses, table, strict=True)]
    gain_p = [h.with_calibration(sign_flip(-h.losses), -1) if gained[i] else 1.0 for i, h in enumerate(table)]
    gains = holm(np.array(gain_p))
    return tuple(
        TestedHypothesis(h, float(own), float(after), _verdict(h, loss, float(after), float(gain)))
        for h, own, after, loss, gain in zip(table, p, adjusted, losses, gains, strict=True)
    )


def settings_of(results: Results) -> GateSettings:
    """The field `gate` of the recipe that a folder was run with; the defaults if it has none."""
    recipe = results.plan.resolved_recipe if results.plan else {}
    if "gate" not in recipe and results.current:
        recipe = results.current[0].record.provenance.resolved_recipe
    return parse_settings(recipe.get("gate") or {}, f"{results.folder}: gate")


def _replaced(values: dict[str, Any], by: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values with some of them replaced."""
    inner = {name: _replaced(values.get(name) or {}, own) for name, own in by.items() if isinstance(own, Mapping)}
    return values | dict(by) | inner


def parse_settings(values: Any, where: str) -> GateSettings:
    """Settings from a mapping; an error says which field is wrong."""
    try:
        return GateSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        *place, name = map(str, first["loc"])
        hint = ""
        if first["type"] == "extra_forbidden":
            allowed = list((PARTS[place[0]] if place else GateSettings).model_fields)
            hint = f"{did_you_mean(name, allowed)} Allowed: {', '.join(allowed)}."
        raise CheckError(f"{'.'.join(filter(None, [where, *place, name]))} {problem(first)}{hint}") from None


def _verdict(hypothesis: Hypothesis, loss: float, adjusted: float, adjusted_gain: float) -> Verdict:
    if loss > hypothesis.tolerance and adjusted <= hypothesis.alpha:
        return "worse"
    if hypothesis.misses_margin:
        return "not_excluded"
    if loss > hypothesis.tolerance:
        return "unclear"
    return "better" if adjusted_gain <= hypothesis.alpha else "same"


def _compare(pairs: Sequence[Pair], settings: GateSettings, ignore_kl: bool) -> tuple[list[Hypothesis], list[Finding]]:
    """The hypotheses of a cell, as means over its calibration draws, and what fails without a test."""
    cell, (first, _) = _cell_of(pairs), pairs[0]
    table: list[Hypothesis] = []
    ignored = (KL, KL + WEIGHT) if ignore_kl else ()
    found = [own for before, after in pairs for own in of_records(before.record, after.record, ignored)]
    for paired in pair_documents(*pairs):
        if isinstance(paired, OtherDocuments) and not (paired.before and paired.after):
            continue  # another finding says that the whole task is gone
        if isinstance(paired, OtherDocuments):
            check_other_documents(cell, paired, pairs[0])
            found.append(of_other_documents(cell, paired))
            continue
        found += of_documents(cell, paired, ignored)
        metrics = tuple(metric for metric in first.record.metrics if metric.task == paired.task)
        table += hypotheses(cell, paired, metrics, settings)
    return table, list(dict.fromkeys(found))


def _cell_of(pairs: Sequence[Pair]) -> CellRef:
    """The cell whose calibration draws these are."""
    return pairs[0][1].record.cell.of_all_draws


def _check_altered(baseline: Results, pairs: Sequence[Pair]) -> None:
    for before, _ in pairs:
        if reasons := altered(before):
            raise CheckError(
                f"{baseline.folder} is not a valid baseline: {before.record.cell.name}: {reasons[0].message}"
            )


def _other_recipe(joined: Joined) -> list[str]:
    """What changed in the recipe's cells, and what to do about it."""
    added, removed = (some(list(dict.fromkeys(cell.name for cell in cells))) for cells in (joined.new, joined.dropped))
    if not added and not removed:
        return []
    changes = [f"it no longer has {removed}" if removed else "", f"it now has {added}" if added else ""]
    said = "; ".join(filter(None, changes))
    return [f"The recipe changed: {said}. The other cells are compared; update the baseline with `qbench accept`."]


def _unfinished(joined: Joined, run: Results) -> list[Finding]:
    """Cells of either side that cannot be compared, because the run failed or the recipe changed."""
    found = {stored.record.cell.name: stored for stored in run.current}
    elsewhere = {finding.cell.name: finding for finding in misplaced(run)}
    missing = [
        elsewhere.get(cell.name) or Finding("missing_cell", (cell,), "The run has no record of this cell.")
        for cell in joined.missing
    ]
    missing += [_new_cell(cell, found.get(cell.name)) for cell in joined.new]
    missing += [
        Finding("dropped_cell", (cell,), "The run's recipe no longer has this cell.") for cell in joined.dropped
    ]
    failed = []
    for _, stored in joined.failed:
        failure = stored.record.failure
        by: FoundBy = "audit" if failure and failure.kind == "audit" else "records"
        failed.append(Finding("failed_cell", (stored.record.cell,), f"The cell failed {_reason(stored)}", by))
    return missing + failed


def _new_cell(cell: CellRef, stored: StoredRecord | None) -> Finding:
    if stored is None or stored.record.state == "done":
        return Finding("new_cell", (cell,), "The baseline does not have this cell.")
    message = f"The baseline does not have this cell, and it failed {_reason(stored)}"
    return Finding("new_cell_failed", (cell,), message)


def _reason(failed: StoredRecord) -> str:
    failure = failed.record.failure
    return f"({failure.kind}): {failure.reason}" if failure else "(error): no reason is recorded"


def _without_kl(now: Results, then: Results, joined: Joined) -> list[str]:
    """A sentence if no cell of one side has KL, as in records of qbench 0.1: KL can then not be compared.

    If only some cells have no KL, they lost it, and the check fails as for any other missing metric.
    """
    sides = zip((then, now), zip(*joined.pairs, strict=True), strict=False)
    lacking = [
        results.folder
        for results, own in sides
        if not any(metric.metric == KL for stored in own for metric in stored.record.metrics)
    ]
    if len(lacking) != 1:
        return []
    renew = " Update the baseline with `qbench accept`." if lacking[0] == then.folder else ""
    return [f"KL was not compared: {lacking[0]} has none. All other scores were compared.{renew}"]


def _tasks_with_kl(joined: Joined) -> set[str]:
    """The tasks of which at least one side has KL."""
    both = (stored for pair in joined.pairs for stored in pair)
    return {metric.task for stored in both for metric in stored.record.metrics if metric.metric == KL}


def _check_overrides(settings: GateSettings, table: Sequence[Hypothesis], without_kl: Collection[str]) -> None:
    """An error if an override is for something that is not tested: it is a typo, or would silently do nothing.

    without_kl: tasks of which only one side has KL. Their KL may have a tolerance, but a margin
    is an error, because it needs KL on both sides.
    """
    tested = {f"{h.task}.{h.metric}" for h in table}
    for task, metrics in settings.overrides.items():
        for metric, own in metrics.items():
            name, lacks_kl = f"{task}.{metric}", metric == KL and task in without_kl
            if lacks_kl and own.noninferiority is not None:
                raise CheckError(
                    f"gate.overrides.{name}.noninferiority is {own.noninferiority:g}, but only one of the two runs has "
                    "KL. Leave it out, or compare runs that have it."
                )
            if name not in tested and not lacks_kl:
                raise CheckError(
                    f"gate.overrides.{name} is not a tested metric; these are tested: {', '.join(sorted(tested))}."
                    + did_you_mean(name, tested)
                )


def _check_margins(settings: GateSettings, table: Sequence[Hypothesis]) -> None:
    """An error if a margin applies to nothing: a pass would promise what nobody checked."""
    tested = {str(h.kind) for h in table}
    for kind, margin in settings.noninferiority:
        if margin is not None and kind not in tested:
            raise CheckError(
                f"gate.noninferiority.{kind} is {margin:g}, but the two runs have no {kind} in common; these are "
                f"tested: {', '.join(sorted(tested))}. Leave it out, or compare runs that have it."
            )


def _check_limits(settings: GateSettings, table: Sequence[Hypothesis]) -> None:
    """The same for limits of damage."""
    tested = {(label, str(h.kind)) for h in table if h.limit is not None for label in (h.cell.label, EVERY)}
    for label, limits in settings.max_damage.items():
        for kind, limit in limits:
            if limit is not None and (label, kind) not in tested:
                raise CheckError(
                    f"gate.max_damage.{label}.{kind} is {limit:g}, but there is no {kind} that it applies to. Leave it "
                    "out, or run tasks that have it."
                )


def _too_few(settings: GateSettings, table: Sequence[Hypothesis]) -> Iterator[Finding]:
    """A failure for each task with fewer documents than required; copies of a document count once."""
    documents: dict[tuple[CellRef, str], int] = {}
    for h in table:
        if h.is_score:
            documents[h.cell, h.task] = min(len(h.losses), documents.get((h.cell, h.task), len(h.losses)))
    for (cell, task), number in documents.items():
        if number < settings.min_documents:
            message = f"{task} has {counted(number, 'document')}; at least {settings.min_documents} are required"
            yield Finding("too_few_documents", (cell,), f"{message} (gate.min_documents).")


def _notes(now: Results, then: Results, joined: Joined, settings: GateSettings, scores_only: bool) -> list[str]:
    notes = []
    if scores_only:
        notes.append("Audits were not compared (--scores-only).")
    untouched = len(then.current) - sum(map(len, (joined.pairs, joined.missing, joined.failed, joined.dropped)))
    if untouched:
        notes.append(f"Not in this run: {counted(untouched, 'cell')} of the baseline (gate.baseline_may_hold_more).")
    versions = [other_versions(before.record, after.record) for before, after in joined.pairs]
    notes += [f"Different from the baseline: {found}." for found in dict.fromkeys(versions) if found]
    return notes


def _other_settings_of_the_gate(baseline: Results, settings: GateSettings) -> list[str]:
    """A sentence if the gate's settings differ from the baseline's: they may be looser."""
    then, now = (dict(_flat(own.model_dump())) for own in (settings_of(baseline), settings))
    names = [name for name in dict.fromkeys([*then, *now]) if name != "baseline_may_hold_more"]
    moved = [
        f"{name} {then.get(name, 'not set')} → {now.get(name, 'not set')}"
        for name in names
        if then.get(name) != now.get(name)
    ]
    has_own = any(not stored.record.imported for stored in baseline.current)
    from_what = "the baseline's" if has_own else "the defaults"
    return [f"The gate's settings differ from {from_what}: {', '.join(moved)}."] if moved else []


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by dotted names, such as tolerances.accuracy; without those that are None."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", value

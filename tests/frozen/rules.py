"""What each sentence is called: findings, notes and errors are frozen by these names, so their words may change.

If the words of a sentence change, change its expression here. Groups (task, metric, other, …) are frozen with the name.
"""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
TASK, METRIC = r"(?P<task>\S+)", r"(?P<metric>\S+)"
SCORE = rf"{TASK} {METRIC}"
RECORD = r"record\.json"

# Why a cell's numbers cannot be right: records/findings.
FINDINGS = {
    "same_weights": rf"in {TASK} the log-likelihoods of .*to the last bit to those of (?P<other>.*): the same .*",
    "too_near": r"(in (?P<task>.*) )?its log-likelihoods are too close to the unquantized .* measured\?",
    "same_calibration": r"its calibration text is that of (?P<other>\S+); draws must differ\.",
    "other_kl": rf"in {TASK} KL (is|was) .*",
    "other_tokenizer": r"its tokenizer is not that of .*",
    "unlike_unquantized_checkpoint": r"its checkpoint is not that of .*",
    "other_tokens": rf"{TASK}: the texts have other numbers of tokens .*",
    "misplaced": r"\S+ (is of this cell|has the key of this cell), but .*",
    "too_good": rf"in {TASK} it is better than the unquantized model by .* a fifth of it\.",
    "recovered": r"quantization costs it .* in the baseline\. One bit more would leave at least .*?\.",
    "does_not_follow": rf"in {SCORE} does not follow from the log-likelihoods of .*?\.",
    "no_audit": r"(\S+:? has|it has) no audit, so nothing proves that it was quantized\.",
    "audit_failed": r"it has scores, but did not pass its audit: .*\.",
    "out_of_range": rf"({SCORE}: )?\S+ is (not a percentage|below [01]; a \w+ cannot be( negative)?)\.",
    "wrong_direction": rf"{SCORE}: better is .*, but \w+ is better\.",
    "not_of_whole_documents": rf"({SCORE}: )?\S+ is impossible with .* documents; the nearest possible value is \S+\.",
    "not_log2_of_byte_perplexity": rf"({SCORE}: )?\S+ is not log2 of byte_perplexity, \S+\.",
    "below_byte_perplexity": rf"({SCORE}: )?\S+ is below byte_perplexity, but a word .*?\.",
    "too_sure": rf"({SCORE}: )?\S+ is too low for acc \S+; it must be at least \S+\.",
    "altered_key": rf"{RECORD}: the key is not the hash of its identity\.",
    "altered_identity": rf"{RECORD}: the cell's (?P<field>\w+) is .*, but its identity says .*\.",
    "altered_label": rf"{RECORD}: the label (\S+ is not one of|is \S+, but by its identity it must end in) .*\.",
    "altered_analysis": rf"{RECORD} (is about \w+, but its|has no \w+\.|has no \S+ next to|has \d+ tokens, but).*",
    "no_samples": rf"{RECORD} has scores, but no samples\.parquet to prove them\.",
    "repeated_metric": rf"{SCORE} is in {RECORD} more than once\.",
    "other_aggregation": rf"{SCORE} has the aggregation \w+; lm-eval uses \w+\.",
    "no_values": rf"{SCORE} is \S+ in .*; the samples have no value for it\.",
    "other_count": rf"{SCORE} has .* documents in .*; the samples have .*\.",
    "altered_value": rf"{SCORE} is \S+ in .*; its samples give .*\.",
    "altered_stderr": rf"{SCORE} has a standard error of \S+ in .*; its samples give .*\.",
    # Published numbers: report/published_rules.py.
    "same_scores": r"the same scores in all \d+ metrics, so both are scores of the same model \(.*\)\.",
    "no_damage": r"these are scores of an unquantized or nearly lossless model, not of a .*\.",
    "wrong_delta": r"Δ is \S+, but .* is \S+\.",
}
# What must not differ between a run and its baseline: records/findings/pairs.py, gate/verdict.py.
CHECKS = {
    "missing_cell": r"The run has no record of this cell\.",
    "new_cell": r"The baseline does not have this cell\.",
    "new_cell_failed": r"The baseline does not have this cell, and it failed .*",
    "dropped_cell": r"The run's recipe no longer has this cell\.",
    "failed_cell": r"The cell failed \((?P<kind>[\w-]+)\): .*",
    "too_few_documents": rf"{TASK} has .* documents?; at least .* are required \(gate\.min_documents\)\.",
    "other_draws_documents": rf"{TASK}: the calibration draws did not see the same documents: .*",
    "unlike_unquantized_documents": rf"{TASK}: the documents differ from those of .*",
    "other_documents": rf"{TASK}: the documents differ from the baseline's: .*",
    "few_shot": rf"{TASK} has .* few-shot examples in .* and .* in .*\.",
    "other_task": rf"{TASK} is not the task of .*: its file or its documents changed\.",
    "other_direction": rf"{SCORE}: the direction \(better\) is .* in .* and .* in .*\.",
    "other_aggregation_than_baseline": rf"{SCORE}: the aggregation is .* in .* and .* in .*\.",
    "lost_task": rf"{TASK} is in (the baseline|\S+) but not in (the run|this cell)\.",
    "new_task": rf"{TASK} is in (the run|this cell) but not in .*\.",
    "lost_metric": rf"{SCORE} is in (the baseline|\S+-none-16) but not in (the run|this cell)\.",
    "new_metric": rf"{SCORE} is in (the run|this cell) but not in .*\.",
    "audit_new_or_missing": r"The audit is (new|missing)\.",
    "audit_form": r"(?P<field>method|bits|activation_bits|linear_weights|parts) is .* and .* in the run\.",
    "other_setting": r"(?P<field>\w+) is .* in .* and .* in .*\.",
    "audit_lost_layers": r"\d+ layers are quantized instead of \d+; missing: .*\.",
    "audit_more_layers": r"\d+ more layers? quantized: .*\.",
    "audit_layer_form": r"The (?P<field>code width|group size|code size in bytes) changed from .* to .*\.",
    "audit_not_finite": r"Weights are NaN or infinite: .*\.",
    "audit_drift_of_draws": r"(?P<field>Weight scale|Relative weight error) changed .* on average over draws: .*\.",
    "audit_drift": r"(?P<field>Weight scale|Relative weight error) changed by more than .*\.",
    "nans": rf"{SCORE} is NaN or infinite for .*\.",
    "new_nans": rf"{SCORE} became NaN or infinite for .*\.",
    "other_divisors": rf"{SCORE}: the divisors of log-likelihoods differ from the baseline's\.",
    "lost_columns": r"Its samples lack the columns (?P<field>.*), which the baseline's have\.",
    "new_columns": r"Its samples have the columns (?P<field>.*), which the baseline's lack\.",
    "other_answers": rf"{TASK}: the choices or right answers of (?P<number>\d+) documents? differ .*",
    "slower": r"It took .*; the baseline took .*",
    "larger": r"Its weights take .*; the baseline's take .*",
    # What a reader must know.
    "other_checkpoint": r"The checkpoint differs from the baseline's, so only scores are compared .*",
    "other_part": r"The (?P<field>tokenizer|calibration|quantizer's options|execution|token budget).* baseline's .*",
    "recipe_changed": r"The recipe changed: .*",
    "settings_differ": r"The gate's settings differ from (the baseline's|the defaults): .*\.",
    "kl_not_compared": r"KL was not compared: .*",
    "audits_not_compared": r"Audits were not compared \(--scores-only\)\.",
    "part_of_baseline": r"Not in this run: (?P<number>\d+) cells? of the baseline .*",
    "other_versions": r"Different from the baseline: .*\.",
    "several_results": r"\S+ has several results of .*; the newest are used .*",
}
# Why a command stops with exit code 2: gate/pairing.py, gate/verdict.py, gate/damage.py, gate/imported.py,
# gate/accept.py, gate/power.py, records/store.py and reports.
ERRORS = {
    "baseline_altered": r"\S+ is not a valid baseline: \S+: .*",
    "baseline_has_failed_cells": r"\S+ is not a valid baseline: .* failed in it\..*",
    "baseline_incomplete": r"\S+ is an incomplete baseline: .*",
    "baseline_is_the_run": r"\S+ is the baseline itself; .*",
    "no_baseline": r"\S+ (does not exist|contains no records), so there is no baseline\. .*",
    "baseline_misspelt": r"\S+ does not exist\. Did you mean .*\?",
    "no_record_of_any_cell": r"\S+ has no record of any planned cell; .*",
    "no_cell_in_common": r"\S+ and \S+ have no cell in common: .*",
    "number_of_draws": r"\S+ has \d+ calibration draws? in \S+ and \d+ draws? in the baseline .*",
    "no_document_in_common": rf"(?P<cell>\S+), {TASK}: the run and the baseline have no document in common; .*",
    "run_with_limit": rf"(?P<cell>\S+), {TASK}: the run has \d+ documents and the baseline \d+, of which .*--limit\..*",
    "other_tasks": rf"The task {TASK} is in \S+ but not in \S+: .*",
    "without_documents": r"\S+ has no per-document results \(samples\.parquet\), which the gate needs\.",
    "nothing_to_test": r"\S+ and \S+ have no metric in common that the gate can test\.",
    "override_not_tested": r"gate\.overrides\.(?P<field>\S+) is not a tested metric; .*",
    "override_needs_kl": r"gate\.overrides\.(?P<field>\S+) is .*, but only one of the two runs has KL\..*",
    "margin_of_nothing": r"gate\.noninferiority\.(?P<field>\S+) is .* have no \w+ in common; .*",
    "limit_of_nothing": r"gate\.max_damage\.(?P<field>\S+) is .*, but there is no \w+ that it applies to\..*",
    "limit_of_no_cell": r"gate\.max_damage\.(?P<field>\S+): \S+ has no such quantization; .*",
    "limit_without_unquantized": r"gate\.max_damage needs the unquantized model of \S+, .*",
    "limit_with_other_documents": rf"(?P<cell>\S+), {TASK}: its documents differ from those of .*",
    "model_names": r"\S+ has results of .*, and \S+ of .*: the model names do not match\..*",
    "lm_eval_and_qbench": r"\S+ is from lm-eval and \S+ from qbench: .*",
    "asked_otherwise": rf"{TASK}: the (?P<field>[\w -]+) differ \(.*\): \S+ and \S+ cannot be compared\.",
    "asked_other_questions": rf"\S+, line \d+: the (?P<field>[\w -]+).*? of {TASK} differ from those in .*",
    "no_results": r"\S+ contains no records, as `qbench run` writes them, and no results of lm-eval .*",
    "unfinished_run": r"\S+: \S+ is missing or failed; only a finished run can become a baseline\.",
    "fails_against_itself": r"\S+ cannot be a baseline, because it fails the gate even against a copy of itself: .*",
    "cannot_be_baseline": r"\S+ cannot be a baseline: .*",
    "part_accepted": r"\S+ covers only part of a baseline .*",
    "no_metrics": r"\S+ has no metrics, so no later run could be compared with it; .*",
    "no_noise": r"\S+ and .* have the same scores in every document, so there is no noise to measure\..*",
    "no_pairs_for_noise": r"\S+ has no pair of cells to measure noise from: .*",
    "no_family_in_common": r"\S+ and \S+ have no family in common: .*",
    "no_data_for_kind": r"\S+ has no data for --kind \w+[;.].*",
    "kind_without_rows": r"--kind \w+ has no json\. .*",
    "lm_eval_output": r"\S+ is lm-eval's output\. .*",
    "no_records": r"\S+ contains (no|neither) records.*",
    "samples_missing": r"\S+: the samples of \S+ are missing; .*",
    "checksum": r"\S+ does not match the checksum in its record\.json; .*",
    "samples_without_column": r"\S+ lacks the column (?P<field>\S+); run the cell again\.",
}
# Notes on numbers in tables, and remarks below them.
NOTES = {
    "no_record": r"There is no record of \S+\.",
    "no_model": r"The family \S+ has no .* model(, so there is no Δ; see .*?)?\.",
    "no_unquantized": r"There is no unquantized \S+ to compare with\.",
    "no_metric": r"\S+ has no \S+ of \S+\.",
    "failed": r"\S+ failed( in \w+ \([\w-]+\): .*?| \([\w-]+\): .*?)?\.",
    "failed_audit": r"\S+ did not pass its audit: .*?\.",
    "altered": r"\S+ does not match what was measured: .*? Run (the cell|it) again\.",
    "planned": r"(The unquantized model is planned|Planned|\S+ is planned) but not run yet; `qbench .*?` will run it\.",
    "not_offered": r"\S+ does not offer \d+ bits\.",
    "same_windows": r"\S+ was calibrated on the same windows as \S+, so it counts once\.",
    "some_draws": r"Mean of \d+ of \d+ calibration draws\.",
    "common_draws": r"Only the calibration draws that all models have: .*?\.",
    "one_draw": r"One calibration draw: (the interval covers documents only.*?|how much another draw would .*?)\.",
    "no_interval_other_documents": r"No interval: .*? did not see the same documents of this task\.",
    "no_interval_documents": r"No interval: \S+ has no per-document results of \S+\.",
    "no_interval_values": r"No interval: \S+ of \S+ cannot be computed from the documents' values\.",
    "no_interval_draws": r"No interval: .*? have no calibration draw in common\.",
    "no_interval_few": r"No interval: (too few documents of \S+ have a value of \S+|\S+ has only one document)\.",
    "direction_unknown": r"It is not known whether higher or lower \S+ is better\.",
    "not_above_chance": r"(Not above chance|The quantized score is not above chance) \(\S+\)\.",
    "not_judged_documents": r"Not judged: ours uses .*? documents, the published number .*?\.",
    "not_judged_noise": r"Not judged: the repeat noise of \S+ \S+ is unknown\.",
    "delta_needs_both": r"Δ needs the scores of both .*? and .*?\.",
    "not_published": r"\S+ is not in \S+\.",
    "trial": r"A trial: only the first .*\.",
    "imported": r"From lm-eval, so not audited .*",
    "unnamed": r"No quantization was given for these, so they are shown as unquantized: .*",
    "mean_over_draws": r".*: means over .* calibration draws; intervals include their spread\.",
    "versions": r"Some cells were measured with other code or packages than the latest one: .*",
    "suspicious": r"Suspicious: .*",
    "measured_on": r"Measured on .*\.",
    "calibration_text": r"Calibration text of .*\.",
    "start_levels": r"The unquantized .* models start at different mean accuracies .*",
    "headline_leaves_out": r"The headline leaves out (?P<field>\S+): .*",
    "claims": r"The 95% intervals of the verdicts above are not adjusted\. .*",
    "published_headline": r"Published numbers have no per-document results\. .*",
    "texts": r".* texts of up to \d+ tokens, .* in all; \w+\.",
    "quantized_pairs": r"\S+, share of query–key pairs whose key was quantized: .*",
    "not_analyzed": r"\S+ was not analyzed; `qbench analyze` measures .*",
}
RULES = {name: re.compile(text) for name, text in (FINDINGS | CHECKS | ERRORS | NOTES).items()}


BASELINE = "In the baseline: "


class UnknownSentenceError(Exception):
    """A sentence that no rule matches would be unprotected."""


def rule(sentence: str) -> str:
    """A sentence as its rule and groups, such as `does_not_follow piqa acc`."""
    sentence = sentence.replace(str(ROOT), "clone")  # whose path may have spaces
    if sentence.startswith(BASELINE):
        return f"baseline: {rule(sentence.removeprefix(BASELINE))}"
    for name, expression in RULES.items():
        if found := expression.fullmatch(sentence.strip()):
            return " ".join([name, *(own for own in found.groupdict().values() if own)])
    raise UnknownSentenceError(f"No rule of tests/frozen/rules.py matches: {sentence}")


def rules_of_notes(text: str) -> list[str]:
    """The rules of sentences in one text, in the alphabet's order."""
    return sorted(_each(text.strip()))


def _each(text: str) -> Iterator[str]:
    while text:
        matches = ((name, re.match(rf"(?:{NOTES[name]})(?=\s|$)", text)) for name in NOTES)
        matches = ((name, found) for name, found in matches if found)
        audit = re.match(FINDINGS["no_audit"], text)
        name, found = next(matches, ("no_audit", audit))
        if not found:
            raise UnknownSentenceError(f"No rule of tests/frozen/rules.py matches: {text}")
        yield name
        text = text[found.end() :].strip()

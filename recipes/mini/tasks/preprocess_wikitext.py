"""wikitext's own functions: a task file names functions of a file beside it."""

from lm_eval.tasks.wikitext.preprocess_wikitext import process_results, wikitext_detokenizer

__all__ = ["process_results", "wikitext_detokenizer"]

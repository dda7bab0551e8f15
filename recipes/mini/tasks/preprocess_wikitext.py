"""wikitext's functions: a task file can only name functions of a file next to it."""

from lm_eval.tasks.wikitext.preprocess_wikitext import process_results, wikitext_detokenizer

__all__ = ["process_results", "wikitext_detokenizer"]

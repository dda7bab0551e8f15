"""lm-eval's own output (results_*.json, samples_*.jsonl) as records. Needs neither lm-eval nor torch."""

"""qbench: what quantization costs a model, measured, proved and paired."""

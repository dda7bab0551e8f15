"""Why quantization hurts: sinks, activations, sparsity and dead heads of a model on texts, one module per idea."""

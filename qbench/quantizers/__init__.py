"""Quantizers that prove that they quantized."""

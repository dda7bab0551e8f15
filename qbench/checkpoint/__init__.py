"""Checkpoints: Hugging Face's Llama layout or flash-linear-attention's."""

"""Softpick, a rectified softmax, and attention with it and its kin on CUDA (Triton), CPU and in plain torch."""

from softpick.attention import attention_weights, normalized_attention, softpick_attention
from softpick.normalizers import NORMALIZERS
from softpick.reference import softpick

__all__ = ["NORMALIZERS", "attention_weights", "normalized_attention", "softpick", "softpick_attention"]

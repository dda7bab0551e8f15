"""Softpick, a rectified softmax; attention with it and related normalizers on CUDA (Triton), CPU and plain torch."""

from softpick.attention import attention_weights, normalized_attention, softpick_attention
from softpick.normalizers import NORMALIZERS
from softpick.reference import softpick

__all__ = ["NORMALIZERS", "attention_weights", "normalized_attention", "softpick", "softpick_attention"]

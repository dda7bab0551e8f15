"""Softpick, a rectified softmax, and attention with it on CUDA (Triton), CPU and in plain torch."""

from softpick.attention import softpick_attention
from softpick.reference import softpick

__all__ = ["softpick", "softpick_attention"]

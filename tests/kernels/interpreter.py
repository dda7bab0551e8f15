"""Fixes for Triton's interpreter, which multiplies bfloat16 bit patterns as integers and truncates casts to it."""

import numpy as np
import pytest
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def to_float32(data: np.ndarray) -> np.ndarray:
    return (data.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(data: np.ndarray) -> np.ndarray:
    """Round to nearest, ties to even, as the hardware does."""
    bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def mend_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make dot products and casts of bfloat16 right for one test."""
    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def create_dot(self, a, b, d, *options):
        if a.dtype.scalar != tl.bfloat16:
            return dot(self, a, b, d, *options)
        return TensorHandle(np.matmul(to_float32(a.data), to_float32(b.data)) + d.data, d.dtype.scalar)

    def cast_impl(self, src, dst_type):
        source, target = src.dtype.scalar, dst_type.scalar
        if (source, target) == (tl.float32, tl.bfloat16):
            return TensorHandle(to_bfloat16(src.data), target)
        if (source, target) == (tl.bfloat16, tl.float32):
            return TensorHandle(to_float32(src.data), target)
        return cast(self, src, dst_type)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast_impl)

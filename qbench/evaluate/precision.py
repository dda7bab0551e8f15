"""The precision of CUDA's matrix products: set here, not left to torch's defaults, the environment or packages."""

import torch

# float32 products in float32, not TF32; sums of float16 and bfloat16 products in float32 to the end. By default
# torch rounds the parts of a split product to 16 bits, and which products are split depends on the GPU.
FP32_PRECISION = "ieee"


def set_precision() -> dict[str, str | bool]:
    """Set it for this process; return the settings that torch reports, for the record."""
    matmul = torch.backends.cuda.matmul
    matmul.fp32_precision = FP32_PRECISION
    matmul.allow_fp16_reduced_precision_reduction = False
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_accumulation = False
    return {
        "fp32_precision": matmul.fp32_precision,
        "fp16_reduced_precision_reduction": matmul.allow_fp16_reduced_precision_reduction,
        "bf16_reduced_precision_reduction": matmul.allow_bf16_reduced_precision_reduction,
        "fp16_accumulation": matmul.allow_fp16_accumulation,
    }

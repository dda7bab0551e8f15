"""How exact CUDA's matrix products are: set, not left to torch's defaults, the environment and other packages."""

import torch

# float32 products in float32, not TF32; sums of float16 and bfloat16 products in float32 to the end. torch's default
# for the sums is to round the parts of a split product to 16 bits, where which products are split depends on the GPU.
FP32_PRECISION = "ieee"


def set_precision() -> dict[str, str | bool]:
    """Set it for this process; gives what torch says is set, for the record."""
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

# qbench with the CUDA build of torch. It uses the host's driver: docker run --gpus all (see docs/gpu.md).
FROM python:3.12-slim-bookworm

# A C compiler and make: a dependency of gptqmodel is built from source, and Triton compiles launchers.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc g++ git make && rm -rf /var/lib/apt/lists/*

# `utility` provides NVML, which qbench uses to find GPUs.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
# cuda needs driver 580 or newer, cu126 needs 525 or newer; cpu is half the size.
ARG TORCH=cuda

WORKDIR /qbench
COPY . .
RUN make setup TORCH="$TORCH" && rm -rf ~/.cache/pip

# Checkpoints and datasets: mount a folder on /cache to keep them.
ENV HF_HOME=/cache/huggingface QBENCH_CACHE=/cache/qbench
ENTRYPOINT ["make"]
CMD ["bench"]

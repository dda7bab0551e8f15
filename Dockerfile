# qbench with the CUDA build of torch. The driver is the host's: docker run --gpus all (see docs/gpu.md).
FROM python:3.12-slim-bookworm

# A C compiler and make: one of gptqmodel's dependencies is built from source, and Triton compiles launchers.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc g++ git make && rm -rf /var/lib/apt/lists/*

# `utility` is NVML, by which GPUs are found.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
# cuda is for drivers from 580, cu126 for those from 525; cpu is half the size.
ARG TORCH=cuda

WORKDIR /qbench
COPY . .
RUN make setup TORCH="$TORCH" && rm -rf ~/.cache/pip

# Checkpoints and datasets: mount a folder there to keep them.
ENV HF_HOME=/cache/huggingface QBENCH_CACHE=/cache/qbench
ENTRYPOINT ["make"]
CMD ["bench"]

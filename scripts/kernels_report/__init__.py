"""What the compilers say of the attention kernels, and how fast they run on a GPU: `make kernels`."""

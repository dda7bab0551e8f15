"""The compilers' report on the attention kernels, and their speed on a GPU: `make kernels`."""

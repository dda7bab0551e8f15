"""`python -m kernels_report`."""

if __name__ == "__main__":
    # Before torch is imported, which takes seconds.
    print("Compiling the attention kernels, for GPUs that need not be here. Loading torch ...", flush=True)

    from kernels_report.report import main

    main()

"""`python -m kernels_report`."""

if __name__ == "__main__":
    # Printed before torch is imported, which takes seconds.
    print("Compiling the attention kernels; no GPU needed. Loading torch ...", flush=True)

    from kernels_report.report import main

    main()

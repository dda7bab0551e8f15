"""`python -m kernels_report`."""

from kernels_report.report import main

if __name__ == "__main__":
    main()

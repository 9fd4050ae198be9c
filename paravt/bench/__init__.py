"""The benchmarks, one file each, and everything that runs, scores and reports them."""

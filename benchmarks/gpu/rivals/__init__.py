"""Other trainers, on the jobs of `benchmarks.gpu.common.write_job`."""

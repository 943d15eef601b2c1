"""CUDA state of other processes: taken off the GPU, put back on it. Each step in a short-lived process with a deadline."""

"""Benchmark of the kernels: a registry of ops (`registry.py`), their workloads (`ops_*.py`), and a runner gated by tests."""

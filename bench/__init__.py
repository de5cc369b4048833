"""Benchmarks: kernels, decode, scheduler, swarm, and their reports."""

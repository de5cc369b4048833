"""Coding agents that keep asking about one code base: the load, how it is sent, and what came back."""

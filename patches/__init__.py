"""Patch machinery and series for what no vLLM extension point reaches."""

"""The vLLM plug-in; the only package that imports vllm."""

"""From a resolved profile to a running vLLM: checks, files and the program that is executed."""

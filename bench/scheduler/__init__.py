"""Fair scheduling measured: the real scheduler in virtual time, on a CPU engine and on a GPU, against stock vLLM."""

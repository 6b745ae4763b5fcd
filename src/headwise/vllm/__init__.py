"""Every head of a model that vLLM serves, on a CPU (experimental)."""

"""What transformers calls our attention implementation."""

NAME = "headwise"

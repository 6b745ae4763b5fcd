"""Capture of Hugging Face models at their attention interface."""

from headwise.models.capture.huggingface._interface import capture_interface

__all__ = ["capture_interface"]

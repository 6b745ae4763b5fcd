"""Hugging Face models, heard at their attention interface."""

from headwise.models.hearing.huggingface._interface import listen_to_interface

__all__ = ["listen_to_interface"]

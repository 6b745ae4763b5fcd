"""The page of a study and that of one text: an HTML file each, drawn from data."""

from headwise.report.page._render import render, render_look, write_page

__all__ = ["render", "render_look", "write_page"]

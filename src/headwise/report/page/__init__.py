"""The page of a study and that of one text: an HTML file each, drawn from data."""

from headwise.report.page._images import render_images as render_images
from headwise.report.page._render import render as render
from headwise.report.page._render import render_look as render_look
from headwise.report.page._render import write_html as write_html

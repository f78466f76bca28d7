"""The timeline explorer: one HTML file that draws, zooms and explains, and loads nothing from outside."""

from .page import explorer_html, write_explorer

__all__ = ["explorer_html", "write_explorer"]

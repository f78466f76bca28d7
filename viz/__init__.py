"""Timelines as PNG and Perfetto trace. Pure: no torch; matplotlib loads when something is drawn."""

from .perfetto import write_perfetto
from .png import render_comparison, render_timeline

__all__ = ["render_comparison", "render_timeline", "write_perfetto"]

"""Timelines as pictures (png) and traces (Perfetto). Pure: no torch, and no matplotlib until something is drawn."""

from .perfetto import write_perfetto
from .png import render_comparison, render_timeline

__all__ = ["render_comparison", "render_timeline", "write_perfetto"]

"""Trace files in the Trace Event Format (Kineto, Perfetto, Chrome): read from others, and written for their tools.

files ──events──> processes ──actions──> Schedule and measured Timelines ──> Exhibit
                            └──rows────> slices with names               ──┘
"""

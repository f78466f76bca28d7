"""Trace files of others in the Trace Event Format (Kineto, Perfetto, Chrome), where slices name a pipeline's actions.

files ──events──> processes ──actions──> Schedule and measured Timelines ──> Exhibit
"""

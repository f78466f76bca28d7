"""Trace files of others in the Trace Event Format (Kineto, Perfetto, Chrome), where slices name a pipeline's actions.

files ──events──> actions of processes ──> Schedule and measured Timelines ──> Exhibit
"""

"""From a compute order to one with communication, and from a finite program to a stream of calls."""

"""From a compute order to programs with communication, and from a finite program to a stream of calls."""

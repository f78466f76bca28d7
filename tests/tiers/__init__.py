"""Which tests `make test` runs, chosen by what was measured of each: its CPU seconds, the branches it takes, the faults it catches."""

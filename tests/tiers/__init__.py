"""Which tests `make test` runs: chosen by the CPU seconds, branches and caught faults that were measured of each."""

"""Random programs around a pipeline, each held against one plain process in float64; what fails is made smaller.

    seed -- generate --> Case -- plain, piped --> two Outcomes -- verdict --> equal, refused, wrong, error, hang
                          ^                                          |
                          +------------------ shrink ----------------+   until nothing can be left out

`python -m support.fuzz --cases 200` from tests/, or `make nightly`; `--seed N` runs the one case of a number.
"""

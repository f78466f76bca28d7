"""Named edits of an untouched model: what a stage does inside, written down, checked and undone."""

from .listed import Edits, UntilBuilt, edit

__all__ = ["Edits", "UntilBuilt", "edit"]

from support.commands import command

__all__ = ["command"]

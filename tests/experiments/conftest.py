from support.commands import cli, command

__all__ = ["cli", "command"]

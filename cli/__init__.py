"""The `stagewright` command: its commands, what they share, and the launcher of local ranks."""

"""The kvlog command: tools that read the log and show, check, move and replay what is in it."""

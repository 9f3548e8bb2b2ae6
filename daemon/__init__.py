"""kvlogd: the process beside each inference server that publishes, follows and takes over sessions."""

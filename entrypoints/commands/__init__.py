"""The subcommands of `launch`, one file each."""

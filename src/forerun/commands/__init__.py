"""The commands of the command line, one file each: what is asked for, what is shown, and the exit status."""

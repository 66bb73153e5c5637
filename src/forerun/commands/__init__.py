"""The commands of the command line, one file each: their options, their output and their exit status."""

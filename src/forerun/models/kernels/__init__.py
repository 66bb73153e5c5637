"""A decoder's pass in C++, at the memory limit: sources, their compilation at first use, and their face in Python."""

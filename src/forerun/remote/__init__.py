"""Servers known by their HTTP interface alone: what their speculation brings, and whether it is exact."""

"""A simulator of rounds on other machines: it computes tokens per second from datasheets or from saved costs."""

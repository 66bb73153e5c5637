"""A simulator of rounds on machines that are not here: from datasheets or kept measurements to tokens per second."""

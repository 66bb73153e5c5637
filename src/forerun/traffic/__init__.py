"""Load tests of a running server: throughput and latency at a known load."""

"""③ ACCEPT: keep what the target would have said, stop where it would have stopped, count what was gained."""
